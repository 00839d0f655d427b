"""Untrusted samples are decoded in processes of their own: the same values, and nothing else that they could do.

These tests run real processes, confined as on a node; the hostile ones run code in the place of a decoder.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from frostline.client.http import HttpTransport
from frostline.core import View
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, SampleError
from frostline.core.system import is_stopped
from frostline.datasets import Dataset
from frostline.node import Node
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, Resize, audio, imagenet, named_inputs, text
from frostline.preprocess.apply import decode_into, pixels_into
from frostline.preprocess.decoders import Decoders, DecoderStatistics, _Child
from frostline.preprocess.steps import frame_parts
from frostline.stores.open import open_store
from frostline.testing.formats import EXAMPLES
from support.formats import put_parquet
from support.nodes import joined, jpeg, make_images, request, same, served, stop, until
from support.sounds import encoded_sound, some_waves
from support.tenants import tenant, token_of
from support.texts import TEXTS, tokenizer_of_words

pytestmark = [
    pytest.mark.promise("apart"),
    pytest.mark.skipif(not Decoders.are_possible(), reason="this system has no memory without a name"),
]

MEMORY = 256 << 20
WHOLE = Preprocess(steps=(Decode(), Resize(32), CenterCrop(32), Normalize(mean=(0.5,) * 3, std=(0.25,) * 3)))

SECRETS = ("FROSTLINE_TOKEN", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_SAS_KEY", "HTTPS_PROXY", "ANY_OTHER")
HOSTILE = """
    import ctypes, os, signal, socket, sys, time
    from frostline.core.errors import DataError, SampleError
    from frostline.preprocess import decoder_process as decoders

    decoders.MAX_DECODE_S, decoders._TURN_S = 0.25, 0.1
    parent = os.getppid()

    def act(preprocess, encoded, out, **more):
        order = bytes(encoded).decode()
        match order:
            case "endless":
                while True: pass
            case "crash":
                ctypes.string_at(0)
            case "memory":
                bytearray(1 << 30)
            case "abort":
                os.abort()
            case "killed":
                signal.raise_signal(signal.SIGKILL)
            case "slow":
                until = time.process_time() + 0.15
                while time.process_time() < until: pass
                raise SampleError("refused: it was slow")
            case "silent":
                raise KeyError("nobody expects it")
            case "exit":
                os._exit(0)
            case "environment":
                raise SampleError(f"refused: {sorted(os.environ)}")
        acts = {
            "open": lambda: open("/etc/hostname"),
            "write": lambda: open("/tmp/frostline-was-here", "w"),
            "list": lambda: os.listdir("/"),
            "socket": lambda: socket.socket(),
            "pair": lambda: socket.socketpair(),
            "fork": lambda: os.fork(),
            "exec": lambda: os.execv(sys.executable, [sys.executable]),
            "kill": lambda: os.kill(parent, signal.SIGKILL),
            "limits": lambda: __import__("resource").prlimit(parent, 9, (1, 1)),
            "memfd": lambda: os.memfd_create("x"),
            "more memory": lambda: __import__("resource").setrlimit(2, (1 << 40, 1 << 40)),
        }
        try:
            acts[order]()
        except (OSError, ValueError) as error:
            raise SampleError(f"refused: {error}") from error
        raise SampleError("it was done")

    decoders.pixels_into = act
    answer_of = decoders._answer_of

    def answered(preprocess, sample, memory, *more, **bounds):
        is_nonsense = memory[sample[4] : sample[4] + sample[5]] == b"nonsense"
        return {} if is_nonsense else answer_of(preprocess, sample, memory, *more, **bounds)

    def errand(asked, pieces, made):
        match asked:
            case "double":
                made[:6] = 2 * bytes(pieces[0])
                return [6, 1, 2]
            case "nothing":
                return {}
            case "too many":
                return [1 << 40]
            case "a text":
                return [3, "x"]
        act(None, asked.encode(), None)

    decoders._answer_of = answered
    decoders.serve_decoding(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), {"errand": errand})
"""


@pytest.fixture(scope="module")
def decoders():
    with closing(Decoders(MEMORY)) as made:
        yield made


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_decoders.py").write_text(textwrap.dedent(HOSTILE))
    with pytest.MonkeyPatch.context() as patch, closing(Decoders(MEMORY, module="hostile_decoders")) as made:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with pytest.MonkeyPatch.context() as keys:
            for name in SECRETS:
                keys.setenv(name, "do not tell")
            assert "refused" in done(made, "open")  # which starts what forks all others
        yield made


def both(decoders, preprocess, encoded, *, is_pixels=False, view=None, id=7):
    """What this process makes of a sample, and another one; or what either says is wrong with it."""
    channels, *sides = preprocess.shape if is_pixels else (0, *preprocess.shape)
    shape, dtype = ((*sides, channels), np.uint8) if is_pixels else (tuple(sides), preprocess.dtype)
    found = []
    for decode in (pixels_into if is_pixels else decode_into, decoders.decode_into):
        out = np.zeros(shape, dtype)
        try:
            decode(preprocess, encoded, out, id=id, view=view)
            found.append(out)
        except SampleError as error:
            found.append(str(error))
    return found


def encoded_as(name, mode="RGB", **options):
    pixels = np.random.default_rng(5).integers(0, 255, (41, 57, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, name, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", ["JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF", "JPEG2000", "ICO", "AVIF"])
@pytest.mark.parametrize("is_pixels", [False, True])
def test_images_of_every_format_have_the_same_bits(decoders, name, is_pixels):
    here, apart = both(decoders, WHOLE, encoded_as(name), is_pixels=is_pixels)
    np.testing.assert_array_equal(here, apart)
    assert apart.any()


def test_random_views_and_turned_images_have_the_same_bits(decoders):
    turned = Image.Exif()
    turned[0x0112] = 6
    random = imagenet(32, augment=True)
    for view in (View(seed=3, epoch=0), View(seed=3, epoch=1)):
        here, apart = both(decoders, random.orient(is_turned=True), encoded_as("JPEG", exif=turned), view=view)
        np.testing.assert_array_equal(here, apart)


@pytest.mark.parametrize("encoded", [b"", b"no image", jpeg(0)[:300], encoded_as("TIFF", "F")])
def test_broken_samples_are_refused_by_the_same_words(decoders, encoded):
    here, apart = both(decoders, WHOLE, encoded)
    assert isinstance(here, str)
    assert here == apart


def test_sounds_texts_and_several_inputs_have_the_same_values(decoders):
    words = text(tokenizer_of_words(), 12)
    tone, kinds = audio(0.3, sample_rate=8_000), ("WAV", "FLAC", "OGG")
    several = named_inputs(pixel_values=WHOLE, input_ids=words)
    cases = [(tone, encoded_sound(some_waves(1)[0][0], kind=kind)) for kind in kinds]
    cases += [(words, one.encode()) for one in TEXTS]
    cases += [(text(tokenizer_of_words(f"more{n}"), 8), TEXTS[n % 4].encode()) for n in range(6) for _ in range(2)]
    cases.append((several, frame_parts([jpeg(3), TEXTS[2].encode()])))
    for preprocess, encoded in cases:
        here, apart = both(decoders, preprocess, encoded)
        np.testing.assert_array_equal(here, apart)
        assert apart.any()


def test_an_image_beyond_its_reserved_memory_is_refused_with_the_bytes(decoders):
    large, out = encoded_as("PNG"), np.zeros(WHOLE.shape, np.float32)
    assert decoders.decode_into(WHOLE, large, out, id=0, view=None, max_pixels=1_000)[0] == 41 * 57
    assert not out.any()
    assert decoders.decode_into(WHOLE, large, out, id=0, view=None, max_pixels=41 * 57)[0] == 41 * 57
    assert out.any()


def test_samples_of_every_size_go_through_the_same_processes(decoders):
    for side in (8, 2_000, 16, 3_000):  # shared memory grows and goes back
        file = BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)).save(file, "PPM")
        np.testing.assert_array_equal(*both(decoders, WHOLE, file.getvalue()))
    assert len(decoders.pids()) == 1


_CONFINED = ("seccomp", "limits alone", *(f"Landlock {number} and seccomp" for number in range(1, 20)))


def done(hostile, act):
    with pytest.raises(SampleError) as raised:
        hostile.decode_into(WHOLE, act.encode(), np.zeros((32, 32, 3), np.uint8), id=0, view=None)
    return str(raised.value)


@pytest.mark.parametrize(
    "act", ["open", "write", "list", "socket", "pair", "fork", "exec", "kill", "limits", "memfd", "more memory"]
)
def test_a_decoder_reaches_no_file_network_or_process(hostile, act):
    assert "refused: " in done(hostile, act)
    assert not Path("/tmp/frostline-was-here").exists()


@pytest.mark.promise(
    "secret", mended="a sample that takes its decoder over could carry out the keys of the environment"
)
def test_a_decoder_has_no_keys_that_a_sample_could_carry_out(hostile):
    told = done(hostile, "environment")
    assert told.endswith("]"), "all of it"
    assert "PYTHONPATH" in told
    assert not [name for name in SECRETS if name in told]


@pytest.mark.parametrize(
    ("act", "cause", "words"),
    [
        ("endless", "time", "s of a core"),
        ("crash", "crash", "breaks the decoder"),
        ("abort", "crash", "breaks the decoder"),
        ("exit", "exit", "without an answer"),
        ("killed", "killed", "the system killed it"),
        ("silent", "exit", "without an answer"),
        ("nonsense", "nonsense", "what makes no sense"),
    ],
)
def test_a_decoder_that_ends_or_hangs_costs_one_sample_and_is_counted(hostile, act, cause, words):
    assert "refused" in done(hostile, "open")  # one that is ready
    [before], counted = hostile.pids(), hostile.statistics().ended
    told = done(hostile, act)
    assert "the process that decoded it ended" in told
    assert words in told
    assert hostile.statistics().ended == {**counted, cause: counted[cause] + 1}
    assert "refused" in done(hostile, "open")
    assert before not in hostile.pids()


def test_waiting_samples_go_to_their_tenants_decoder_together(hostile, monkeypatch):
    messages, sends = [], _Child.do

    def sent(child, tasks):
        messages.append([bytes(task.encoded).decode() for task in tasks])
        assert len({task.tenant for task in tasks}) == 1
        return sends(child, tasks)

    monkeypatch.setattr(_Child, "do", sent)
    orders = {
        "ann": ["open", "open", "crash", "list", "open"],
        "bob": ["nonsense", "open", "open"],
        "eve": ["open"] * 9,
    }

    def told(tenant, order):
        with pytest.raises(SampleError) as raised:
            hostile.decode_into(WHOLE, order.encode(), np.zeros((32, 32, 3), np.uint8), id=0, view=None, tenant=tenant)
        return str(raised.value)

    with ThreadPoolExecutor(20) as pool:
        endless = pool.submit(told, "ann", "endless")  # the others come while it is decoded
        until(lambda: messages)
        found = {name: [pool.submit(told, name, order) for order in some] for name, some in orders.items()}
        told_of = {name: [future.result() for future in some] for name, some in found.items()}
    assert "s of a core" in endless.result()
    for name, some in orders.items():
        for order, words in zip(some, told_of[name], strict=True):
            ended = {"crash": "breaks the decoder", "nonsense": "makes no sense"}
            assert ended.get(order, "refused: ") in words, (name, order)
    assert messages[0] == ["endless"]
    assert [len(some) for some in messages if "crash" in some] == [5], "whatever ends its process is tried once"
    assert max(map(len, messages)) == 8
    assert len(messages) < 1 + sum(map(len, orders.values()))


@pytest.mark.parametrize("order", ["endless", "slow"])
def test_samples_of_a_tenant_that_take_long_hold_another_tenant_up_for_two_of_them(hostile, order):
    def told(tenant, order):
        with pytest.raises(SampleError) as raised:
            hostile.decode_into(WHOLE, order.encode(), np.zeros((32, 32, 3), np.uint8), id=0, view=None, tenant=tenant)
        return str(raised.value)

    with ThreadPoolExecutor(8) as pool:
        ann = [pool.submit(told, "ann", order) for _ in range(5)]
        until(lambda: ann[0].done() or len(hostile._waiting) == 4)  # noqa: SLF001 (those that go together)
        bob = pool.submit(told, "bob", "open")
        assert "refused" in bob.result()
        assert sum(future.done() for future in ann) <= 3
        assert all(("s of a core" if order == "endless" else "slow") in future.result() for future in ann)


def test_many_threads_get_each_its_own_sample(decoders):
    random = imagenet(32, augment=True)
    cases = [(preprocess, jpeg(n), View(seed=n, epoch=1)) for n in range(12) for preprocess in (random, imagenet(24))]

    def decoded(decode, case):
        preprocess, encoded, view = case
        out = np.zeros(preprocess.shape, np.float32)
        decode(preprocess, encoded, out, id=3, view=view)
        return out

    with ThreadPoolExecutor(8) as pool:
        apart = list(pool.map(partial(decoded, decoders.decode_into), cases))
    for case, found in zip(cases, apart, strict=True):
        np.testing.assert_array_equal(found, decoded(decode_into, case))


def test_no_process_sees_samples_of_two_tenants(hostile):
    def asked(tenant):
        with pytest.raises(SampleError, match="refused"):
            hostile.decode_into(WHOLE, b"open", np.zeros((32, 32, 3), np.uint8), id=0, view=None, tenant=tenant)
        return hostile.pids()[-1]

    processes = {name: asked(name) for name in ("ann", "bob")}
    assert processes["ann"] != processes["bob"]
    for name in ("bob", "ann", "ann", "bob"):  # each goes on with its own, without another start
        assert asked(name) == processes[name]
    many = {asked(f"tenant {number}") for number in range(20)}
    assert len(many) == 20
    waiting = hostile.pids()
    assert len(waiting) == 16
    assert not {*processes.values()} & {*waiting}, "whoever came last keeps a process"
    until(lambda: not any(map(alive, {*many, *processes.values()} - {*waiting})))
    assert asked("ann") not in (*processes.values(), *many)


def test_health_says_what_confines_decoders_and_how_many_ended():
    with closing(Decoders(MEMORY)) as decoders:
        assert decoders.statistics() == DecoderStatistics(
            confined_by="", started=0, ended=dict.fromkeys(("time", "crash", "killed", "exit", "nonsense"), 0)
        )
        decoders.warm()
        [ready] = decoders.pids()
        assert decoders.statistics().confined_by in _CONFINED
        decoders.decode_into(WHOLE, jpeg(0), np.zeros(WHOLE.shape, np.float32), id=0, view=None, tenant="ann")
        assert decoders.pids() == (ready,)
        decoders.decode_into(WHOLE, jpeg(0), np.zeros(WHOLE.shape, np.float32), id=0, view=None, tenant="bob")
        assert ready in decoders.pids()
        assert len(decoders.pids()) == 2
        assert decoders.statistics().started == 2
        assert not any(decoders.statistics().ended.values())


def test_a_decoder_gets_no_more_memory_than_was_reserved(hostile):
    out = np.zeros((32, 32, 3), np.uint8)
    with pytest.raises(SampleError, match="more memory than was reserved"):
        hostile.decode_into(WHOLE, b"memory", out, id=0, view=None, max_pixels=1_000)
    assert "refused" in done(hostile, "open")


def own_bytes(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))


@pytest.mark.promise("bounded", mended="each process that decoded a large image kept tens of megabytes while it waited")
def test_a_decoder_that_waits_gives_back_what_a_large_image_took(decoders):
    file = BytesIO()
    Image.new("RGB", (2800, 2800)).save(file, "JPEG")
    for _ in range(2):
        decoders.decode_into(WHOLE, file.getvalue(), np.zeros(WHOLE.shape, np.float32), id=0, view=None)
    until(lambda: own_bytes(decoders.pids()[-1]) < 16 << 20)


def test_what_was_killed_while_it_waited_costs_no_sample():
    with closing(Decoders(MEMORY)) as decoders:
        out = np.zeros(WHOLE.shape, np.float32)
        decoders.decode_into(WHOLE, jpeg(0), out, id=0, view=None)
        [pid] = decoders.pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
        decoders.decode_into(WHOLE, jpeg(0), out, id=0, view=None)
        os.kill(decoders._starter._process.pid, signal.SIGKILL)  # noqa: SLF001 (the process that forks them)
        until(lambda: not any(map(alive, decoders.pids())))
        decoders.decode_into(WHOLE, jpeg(0), out, id=0, view=None)
        assert decoders.statistics().ended["killed"] >= 1
        last = decoders.pids()
    until(lambda: not any(map(alive, last)))


def test_what_was_stopped_costs_no_sample_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("frostline.preprocess.decoders._LOOK_S", 0.05)
    with closing(Decoders(MEMORY)) as decoders:
        one, other = (np.zeros(WHOLE.shape, np.float32) for _ in range(2))
        decoders.decode_into(WHOLE, jpeg(0), one, id=0, view=None)
        [pid] = decoders.pids()
        stop(pid)
        began = time.monotonic()
        decoders.decode_into(WHOLE, jpeg(0), other, id=0, view=None)
        assert time.monotonic() - began < 20, "it waited until somebody lets the process go on"
        assert np.array_equal(one, other)
        assert pid not in decoders.pids()
        assert not is_stopped(os.getpid())
    until(lambda: not alive(pid))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_process_is_left_of_a_node_that_was_killed(tmp_path):
    code = """
        import json, numpy as np, sys, time
        from frostline.preprocess.decoders import Decoders
        from frostline.preprocess import imagenet
        decoders, preprocess = Decoders(1 << 28), imagenet(32)
        with open(sys.argv[1], "rb") as file:
            decoders.decode_into(preprocess, file.read(), np.zeros(preprocess.shape, np.float32), id=0, view=None)
        print(json.dumps([*decoders.pids(), decoders._starter._process.pid]), flush=True)
        time.sleep(600)
    """
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a.jpg")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        pids = json.loads(process.stdout.readline())
        assert all(map(alive, pids))
        process.kill()
        until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("double", ([6, 1, 2], b"abcabc")),
        ("open", "refused: "),
        ("socket", "refused: "),
        ("memory", "decoding it takes more memory than was reserved for it"),
        ("crash", "it breaks the decoder"),
        ("endless", "s of a core"),
        ("silent", "it left off without an answer"),
        ("nothing", "makes no sense"),
        ("too many", "makes no sense"),
        ("a text", "makes no sense"),
    ],
)
def test_work_of_another_kind_is_done_within_the_same_limits(hostile, order, said):
    asked = partial(hostile.run, "errand", pieces=[b"abc"], made_bytes=6, may_take=1 << 20, tenant="ann")
    if order == "double":
        assert asked(order) == said
    else:
        with pytest.raises((SampleError, DataError)) as refused:
            asked(order)
        assert said in str(refused.value)
    assert asked("double") == ([6, 1, 2], b"abcabc")


def test_memory_that_a_child_shares_is_given_back_where_it_is_much(hostile):
    large = bytes(70 << 20)
    asked = partial(hostile.run, "errand", "double", made_bytes=6, may_take=1 << 20, tenant="ann")
    asked(pieces=[b"abc", large])
    shared = Path(f"/proc/{hostile.pids()[-1]}/smaps").read_text(encoding="ascii").split("frostline-decode")[1:]
    assert shared
    assert sum(int(part.split("Rss:")[1].split()[0]) for part in shared) < 1 << 10
    assert asked(pieces=[b"abc"]) == ([6, 1, 2], b"abcabc")


def test_a_tenants_columns_are_read_apart(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    store = open_store((tmp_path / "x").as_uri())
    put_parquet(store, [example._replace(data=jpeg(number)) for number, example in enumerate(EXAMPLES)])
    data = Dataset(tmp_path / "x")
    wanted = request(tmp_path / "x", 1, samples=data.samples, reading=data.manifest.reading)
    answers = []
    for tenants in ((), (tenant("a"), tenant("b"))):
        node = Node(NodeSettings(memory_bytes=512 << 20, tenants=tenants), (store.url,))
        token = LoaderSettings(token=token_of("a") if tenants else None)
        with node, served(node) as url, closing(HttpTransport(url, token)) as transport:
            answers.append(joined(transport.features(wanted)))
        monkeypatch.setattr("frostline.datasets.formats.parquet.group_cells", None)
        monkeypatch.setattr("frostline.datasets.formats.parquet.parquet_file", None)
    same(*answers)
    assert not answers[0][3]


def test_a_tenant_gets_the_same_pixels_as_the_nodes_own_user(tmp_path):
    images = make_images(tmp_path / "images", 6, broken=(2,))
    wanted = request(images, 1)
    answers = []
    for tenants in ((), (tenant("a"), tenant("b"))):
        node = Node(NodeSettings(memory_bytes=512 << 20, tenants=tenants), (images.as_uri(),))
        token = LoaderSettings(token=token_of("a") if tenants else None)
        with node, served(node) as url, closing(HttpTransport(url, token)) as transport:
            answers.append(joined(transport.features(wanted)))
            said, counted = transport.health().decoding, transport.node_statistics()["decoders"]
            if tenants:
                assert said.removeprefix("apart, confined by ") in _CONFINED
                assert counted["started"] >= 1
                assert not any(counted["ended"].values())
            else:
                assert (said, counted) == ("in the node's process", None)
    same(*answers)
    assert len(answers[0][3]) == 1
