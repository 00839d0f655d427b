"""Heads trained beside the store: the same bits as at the trainer, within bounds, and never longer than wanted."""

import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.core.errors import (
    BadRequest,
    Forbidden,
    NodeUnreachable,
    OverBudget,
    Overloaded,
    SettingError,
    Unauthenticated,
    UnknownPrefix,
    UnknownTraining,
    UnsafeArtifact,
)
from frostline.core.processes import Limits
from frostline.jobs.in_store import read_assignment, train_beside, write_assignment
from frostline.jobs.in_store_batches import InStoreLoaders
from frostline.models import cut_network
from frostline.models.artifact import write_prefix
from frostline.node import Node
from frostline.node.process import BoundedProcess, start_node
from frostline.training.in_store_process import check_assignment
from frostline.training.loop import Loop
from frostline.training.networks import load_model
from frostline.training.report.report import Record
from frostline.wire.recipes import Recipe
from support.images import image_folder, tiny_preprocess
from support.nodes import served, until
from support.prepared import PLAIN
from support.trainings import assignment_for, frozen, ignore, runs, tampered, trainers_of, training

pytestmark = pytest.mark.promise("survives")

ENDLESS = Recipe(epochs=100_000, batch_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=8)


@pytest.fixture(scope="module")
def node(folder):
    settings = NodeSettings(memory_bytes=1 << 28, device_batch=8, allow_training=True, training_memory_bytes=1 << 30)
    with start_node((str(folder),), settings) as process:
        yield process


@pytest.fixture(scope="module")
def assignment(folder):
    return assignment_for(folder)


@pytest.fixture
def idle(node):
    """The node, with nobody training."""
    until(lambda: not trainers_of(node.pid))
    return node


def here(model, data, preprocess, recipe, url, *, plain=None):
    """Train at the trainer, with the plan at the frost line."""
    record = Record(ignore)
    train, held_out = data.split(0.25, 0)
    with fl.offload(model, data, preprocess=preprocess, near=url, policy="freeze") as job:
        loop = Loop(
            recipe,
            job.head,
            train=lambda epoch: job.loader(recipe.batch_size, shuffle=True, seed=recipe.seed, epoch=epoch, data=train),
            held_out=lambda epoch: job.loader(recipe.batch_size, epoch=epoch, data=held_out, preprocess=plain),
            on_event=record,
        )
        loop.run()
    return record


def there(model, data, preprocess, recipe, url, *, plain=None):
    """The same beside the store."""
    record = Record(ignore)
    train, held_out = data.split(0.25, 0)
    with fl.offload(model, data, preprocess=preprocess, near=url, policy="all_in_store", on_event=record) as job:
        before = job.statistics().wire_bytes
        assert job.train(recipe, train, held_out, plain_preprocess=plain).is_whole
        return record, job.statistics().wire_bytes - before


def learned(record):
    return record.losses, record.epoch_losses, record.scores, record.samples


@pytest.mark.parametrize(
    ("recipe", "flip"),
    [
        (Recipe(epochs=2, batch_size=6, seed=3), False),
        (Recipe(epochs=2, batch_size=5, optimizer="sgd", learning_rate=0.1), True),
        (
            Recipe(
                epochs=2, batch_size=6, optimizer="adamw", weight_decay=0.1, schedule="cosine", warm_up=3, bf16=True
            ),
            False,
        ),
        (Recipe(epochs=4, batch_size=6, learning_rate=0.5, label_smoothing=0.1, patience=1), False),
    ],
    ids=["adam", "sgd on random views", "a schedule in bfloat16", "patience"],
)
def test_losses_scores_and_tensors_are_those_of_a_training_at_the_trainer(folder, idle, recipe, flip):
    model, data = frozen(), fl.Dataset(folder)
    twin, preprocess = copy.deepcopy(model), tiny_preprocess(flip=flip)
    record, _ = there(model, data, preprocess, recipe, idle.url, plain=tiny_preprocess())
    expected = here(twin, data, preprocess, recipe, idle.url, plain=tiny_preprocess())
    assert learned(record) == learned(expected)
    ours, theirs = model.state_dict(), twin.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    untrained = frozen().state_dict()
    # BatchNorm's statistics came back too, and what is frozen is as it was.
    changed = {name for name, tensor in ours.items() if not torch.equal(tensor, untrained[name])}
    assert {"body.1.running_mean", "body.1.num_batches_tracked", "fc.weight"} <= changed
    assert not [name for name in changed if name.startswith("stem")]


@pytest.mark.long
def test_on_photographs_the_head_of_a_pretrained_network_learns_the_same(photographs):
    data = fl.Dataset(photographs)
    data = data.take(np.linspace(0, len(data) - 1, 24).astype(np.int64))
    pretrained = load_model("demo:efficientnet_lite0", classes=len(data.classes))
    network = cut_network(fl.freeze(pretrained.model, until="_blocks.14"), pretrained.preprocess.shape)
    how = {"preprocess": pretrained.preprocess, "plain_preprocess": pretrained.preprocess}
    assignment = assignment_for(data, network, recipe=Recipe(epochs=2, batch_size=6, optimizer="adamw"), **how)
    own = assignment.head.tensors
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    beside, here = Record(ignore), Record(ignore)
    with (
        start_node((data.url,), NodeSettings(memory_bytes=1 << 30, allow_training=True)) as node,
        closing(HttpTransport(node.url)) as transport,
    ):
        transport.put_prefix(assignment.prefix, write_prefix(network.prefix))
        assert train_beside(transport, assignment, beside).is_whole
        received = transport.statistics().bytes_received
        came = {name: tensor.detach().clone() for name, tensor in own.items()}
        with torch.no_grad():
            [tensor.copy_(before[name]) for name, tensor in own.items()]
        remote = InStoreLoaders(assignment, transport, LoaderSettings(), here)
        Loop(
            assignment.recipe,
            network.head,
            train=remote.train,
            held_out=remote.validation_batches,
            on_event=remote.on_event,
        ).run()
    assert learned(beside) == learned(here)
    assert all(torch.equal(tensor, came[name]) for name, tensor in own.items())
    # The head came back, and lines of events: nothing for a sample.
    assert received < sum(tensor.nbytes for tensor in came.values()) + 20_000


def test_tells_a_custom_training_loop_what_to_call(folder, idle):
    with (
        fl.offload(
            frozen(), fl.Dataset(folder), preprocess=tiny_preprocess(), near=idle.url, policy="all_in_store"
        ) as job,
        pytest.raises(SettingError, match="the job's train"),
    ):
        job.loader(8)


def test_a_node_in_the_users_process_does_not_train(folder):
    with (
        fl.offload(
            frozen(), fl.Dataset(folder), preprocess=tiny_preprocess(), node=NodeSettings(memory_bytes=1 << 28)
        ) as job,
        pytest.raises(SettingError, match="process of its own"),
    ):
        job.train(ENDLESS)


def test_a_node_trains_only_where_its_operator_allows_it(folder, assignment):
    with (
        Node(NodeSettings(memory_bytes=1 << 28), (str(folder),)) as closed,
        served(closed) as url,
        pytest.raises(Forbidden, match="--allow-training"),
        training(url, assignment),
    ):
        pass


def test_a_second_training_waits_and_the_first_keeps_its_result(assignment, idle):
    endless = replace(assignment, recipe=ENDLESS)
    with training(idle.url, endless) as first:
        assert next(iter(first))["event"] != "failed"
        with pytest.raises(Overloaded) as refusal, training(idle.url, endless):
            pass
        assert refusal.value.retry_after_s > 1
        assert len(trainers_of(idle.pid)) == 1
        first.stop()
        last = list(first)[-1]
        assert (last["event"], last["is_whole"]) == ("trained", False)
        # The place is free, while the result waits to be fetched.
        with training(idle.url, assignment) as second:
            assert list(second)[-1]["is_whole"] is True
        assert len(first.tensors(last["bytes"], last["digest"])) == last["bytes"]
        first.stop()
        with pytest.raises(UnknownTraining):
            first.tensors(last["bytes"], last["digest"])


def test_a_client_that_dies_takes_its_trainer_with_it(folder, idle):
    code = """
        import sys
        from pathlib import Path
        from frostline.wire.recipes import Recipe
        from support.trainings import assignment_for, training
        endless = assignment_for(Path(sys.argv[2]), recipe=Recipe(epochs=100_000, batch_size=6))
        with training(sys.argv[1], endless) as one:
            for value in one:
                print(value["event"], flush=True)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code), idle.url, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as client:
        assert client.stdout.readline()
        [trainer] = trainers_of(idle.pid)
        client.kill()
        client.wait()
        until(lambda: not runs(trainer))


@pytest.mark.promise("data")
@pytest.mark.skipif(sys.platform != "linux", reason="this system does not say how much a process takes")
def test_a_trainer_writes_to_no_file_that_has_a_name(folder, idle):
    endless = assignment_for(folder, recipe=ENDLESS)
    with training(idle.url, endless) as one:
        for _ in range(3):
            next(iter(one))
        [trainer] = trainers_of(idle.pid)
        written, process = [], Path("/proc", str(trainer))
        for descriptor in (process / "fd").iterdir():
            flags = next(
                line for line in (process / "fdinfo" / descriptor.name).read_text().splitlines() if "flags" in line
            )
            written += [str(descriptor.readlink())] if int(flags.split()[1], 8) & os.O_ACCMODE else []
        assert written, "what it trained goes to a file without one"
        assert [
            name for name in written if name.startswith("/") and "(deleted)" not in name and name != os.devnull
        ] == []


def killed(node, endless):
    """The trainers of a node that is killed while one trains."""
    with suppress(NodeUnreachable), training(node.url, endless) as one:
        next(iter(one))
        trainers = trainers_of(node.pid)
        os.kill(node.pid, signal.SIGKILL)
        assert not [value for value in one if value["event"] in ("trained", "failed")]
    return trainers


def test_a_node_that_dies_takes_its_trainer_with_it(folder, assignment):
    settings = NodeSettings(memory_bytes=1 << 28, allow_training=True)
    with start_node((str(folder),), settings) as node:
        [trainer] = killed(node, replace(assignment, recipe=ENDLESS))
        until(lambda: not runs(trainer))


def begun(assignment, memory_bytes):
    """What a trainer with so much memory says first, and the bound that the system holds it to."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as trained:
        given.write(assignment)
        given.seek(0)
        process = BoundedProcess(
            "frostline.training.in_store_process",
            {"assignment": given, "trained": trained},
            limits=Limits(memory_bytes=memory_bytes),
            what="the trainer",
            option="--training-memory",
        )
        process.begin({"near": "http://127.0.0.1:9", "threads": 1})
        with closing(process):
            try:
                limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
                [line] = [limit for limit in limits if limit.startswith("Max data size")]
                return json.loads(process.line()), line.split()[3:5]
            finally:
                process.end()


def test_a_trainer_gets_no_more_memory_than_its_node_gives_it(assignment, monkeypatch):
    monkeypatch.setenv(PLAIN, "1")
    # With both it found no memory within what reads tensors, which waited for itself for good.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    maximum = 352 << 20
    body = tampered(assignment, ignore, lambda tensors: tensors.update(more=torch.zeros(24 << 20)))
    said, bound = begun(body, maximum)
    assert said["error"] == "OverBudget"
    assert "--training-memory" in said["message"]
    assert bound == [str(maximum)] * 2


def test_a_trainer_that_is_ended_from_outside_says_how_and_what_it_may_have(assignment, idle):
    with training(idle.url, replace(assignment, recipe=ENDLESS)) as one:
        next(iter(one))
        [trainer] = trainers_of(idle.pid)
        os.kill(trainer, signal.SIGKILL)
        last = list(one)[-1]
    assert last["event"] == "failed"
    assert "signal 9" in last["message"]
    assert "1.07 GB (--training-memory)" in last["message"]


def grown(assignment):
    """The same, with a value on the way that is too large for any machine."""

    def change(about):
        for mode in ("training", "evaluation"):
            nodes = about["head"][mode]["graph"]["nodes"]
            nodes.insert(0, {"name": "huge", "op": "aten.zeros.default", "args": [[1 << 20, 1 << 14]], "kwargs": {}})

    return tampered(assignment, change)


def with_op(name):
    def change(about):
        about["head"]["training"]["graph"]["nodes"][0]["op"] = name

    return change


def with_call(op, *arguments):
    def change(about):
        graph = about["head"]["training"]["graph"]
        graph["nodes"][0].update(op=op, args=[{"ref": graph["inputs"][0]}, *arguments], kwargs={})

    return change


def with_value(*path, value):
    def change(about):
        *way, last = path
        for step in way:
            about = about[step]
        about[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (with_op("os.system"), UnsafeArtifact, "os.system"),
        (with_op("aten.bernoulli_.float"), UnsafeArtifact, "not allowed"),
        (with_call("aten.to.dtype", -1), UnsafeArtifact, "takes one of bfloat16, .* for 'dtype', not -1"),
        (with_value("head", "training", "graph", "outputs", value=[{"ref": "nothing"}]), UnsafeArtifact, "nothing"),
        (with_value("head", "training", "places", value=[7]), UnsafeArtifact, "crosses the frost line"),
        (with_value("head", "trained", value=["not.there"]), UnsafeArtifact, "not.there"),
        (with_value("classes", value=2), BadRequest, "labels"),
        (with_value("classes", value=1 << 39), UnsafeArtifact, "must give"),
        (with_value("inputs", value=[]), UnsafeArtifact, "crosses the frost line"),
        (with_value("inputs", 0, "shape", value=[1 << 30, 1 << 30]), UnsafeArtifact, "does not run"),
        (with_value("recipe", "epochs", value="many"), BadRequest, "epochs"),
        (with_value("recipe", "learning_rate", value=-1.0), BadRequest, "learning_rate"),
        (with_value("preprocess", value={"steps": [{"step": "run"}]}), BadRequest, "run"),
        (with_value("format", value=99), UnsafeArtifact, "format 99"),
        *(
            (with_value(*place, "more", value=1), BadRequest, "has no field 'more'")
            for place in (
                (),
                ("inputs", 0),
                ("head",),
                ("head", "training"),
                ("head", "training", "graph"),
                ("recipe",),
            )
        ),
    ],
)
def test_refuses_planted_files_before_anything_runs(assignment, change, error, sentence):
    with pytest.raises(error, match=sentence):
        check_assignment(read_assignment(tampered(assignment, change)), 1 << 30)


def test_a_head_that_would_take_more_than_there_is_is_refused_with_the_figure(assignment, idle):
    with (
        pytest.raises(OverBudget, match=r"6[89].* GB.*--training-memory"),
        training(idle.url, assignment, grown(assignment)),
    ):
        pass
    until(lambda: not trainers_of(idle.pid))


def test_counts_the_copy_of_the_best_head_as_memory(assignment):
    def minimum(recipe):
        asked = replace(assignment, recipe=recipe)
        low, high = 0, 1 << 30
        while high - low > 1:
            middle = (low + high) // 2
            try:
                check_assignment(asked, middle)
                high = middle
            except OverBudget:
                low = middle
        return high

    copied = sum(assignment.head.tensors[name].nbytes for name in assignment.head.returning)
    assert minimum(Recipe(batch_size=6)) - minimum(Recipe(epochs=2, batch_size=6)) == copied > 0


def test_refuses_an_invalid_training(assignment, idle):
    with pytest.raises(UnsafeArtifact, match="safetensors"), training(idle.url, assignment, b"\x80\x04cos\nsystem\n"):
        pass
    with pytest.raises(UnknownPrefix), training(idle.url, replace(assignment, prefix="0" * 64)):
        pass
    with pytest.raises(BadRequest, match="SHA-256"), training(idle.url, replace(assignment, prefix="short")):
        pass


def test_a_training_is_its_tenants_own(folder, assignment):
    tenant = TenantSettings(name="vision", token_sha256=hashlib.sha256(b"open-sesame").hexdigest(), sees_all=True)
    settings = NodeSettings(memory_bytes=1 << 28, allow_training=True, tenants=(tenant,))
    with Node(settings, (str(folder),)) as node, served(node) as url:
        with pytest.raises(Unauthenticated), closing(HttpTransport(url)) as nobody:
            nobody.train(assignment.prefix, write_assignment(assignment)).__enter__()
        with training(url, assignment, settings=LoaderSettings(token="open-sesame")) as one:
            assert list(one)[-1]["event"] == "trained"
        done = node.statistics().tenants["vision"].totals
        assert done.train_s > 0
        # The second epoch asked for nothing.
        assert done.samples == len(assignment.train) + len(assignment.held_out)


def test_a_tenant_that_has_used_its_device_seconds_trains_later(assignment, folder):
    tenant = TenantSettings(name="vision", token_sha256=hashlib.sha256(b"open-sesame").hexdigest(), device_s_per_s=0.5)
    settings = NodeSettings(memory_bytes=1 << 28, allow_training=True, tenants=(tenant,))
    with Node(settings, (str(folder),)) as node:
        account = node.identify("open-sesame")
        account.charge_training(100.0)
        with pytest.raises(Overloaded, match="device seconds") as refusal:
            node.trainings.begin(assignment.prefix, 1, account)
    assert refusal.value.retry_after_s > 100


def test_data_outside_the_nodes_roots_is_not_trained_on(assignment, idle, folder):
    with training(idle.url, replace(assignment, data=folder.parent.as_uri())) as one:
        last = list(one)[-1]
    assert last["error"] == "BadRequest"
    assert "does not serve" in last["message"]


def test_more_unreadable_samples_than_allowed_end_it_with_the_reason(assignment, idle):
    gone = replace(assignment.train, objects=["circle/gone.jpg", *assignment.train.objects[1:]], versions=())
    with training(idle.url, replace(assignment, train=gone, max_skipped=0)) as one:
        told = list(one)
    assert [value["object"] for value in told if value["event"] == "SampleSkipped"] == ["circle/gone.jpg"]
    assert told[-1]["event"] == "failed"
    assert "1 samples are unreadable and the job allows 0" in told[-1]["message"]
