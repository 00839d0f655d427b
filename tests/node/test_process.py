"""A node as a process: it starts or reports why not, and never outlives its parent."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.core.errors import AddressInUse, NodeUnreachable, SettingError, Unauthenticated, Unavailable
from frostline.core.processes import Limits, Worker, without_keys
from frostline.core.system import STARTED
from frostline.node.http.server import listen
from frostline.node.inspection import Inspector
from frostline.node.process import BoundedProcess, start_node
from frostline.node.trials.processes import TrialProcess
from support.matrices import sampled
from support.nodes import make_images, request, until
from support.prepared import PLAIN
from support.trainings import children_of

SMALL = NodeSettings(memory_bytes=96 << 20, device_batch=8)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "here", 40)


@pytest.fixture(scope="module")
def node(images):
    with start_node((images.as_uri(),), SMALL) as node:
        yield node


def runs(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def transport_to(node):
    return closing(HttpTransport(node.url, LoaderSettings(deadline_s=30)))


def test_it_serves_at_its_address(node, images):
    with transport_to(node) as transport:
        assert transport.health().roots == (images.as_uri(),)
        assert sum(len(batch) for batch in transport.features(request(images, 0))) == 40
    assert not node.restart_if_dead()


def test_it_knows_the_tenants_that_it_is_given(images):
    known = TenantSettings(name="ann", token_sha256=hashlib.sha256(b"secret").hexdigest(), roots=(images.as_uri(),))
    with start_node((images.parent.as_uri(),), replace(SMALL, tenants=(known,))) as node:
        with transport_to(node) as transport, pytest.raises(Unauthenticated):
            transport.health()
        with closing(HttpTransport(node.url, LoaderSettings(deadline_s=30, token="secret"))) as transport:
            assert transport.health().roots == (images.as_uri(),)


def test_reports_a_port_in_use_in_one_sentence(images):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(port)):
            listen("127.0.0.1", port)
        with pytest.raises(AddressInUse, match=str(port)):
            start_node((images.as_uri(),), SMALL, port=port)


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 0), ("127.0.0.1", 70_000), ("127.0.0.1", -1)])
def test_reports_an_unusable_address_in_one_sentence(host, port):
    with pytest.raises(SettingError):
        listen(host, port)


def test_reports_an_invalid_root_in_one_sentence():
    with pytest.raises(SettingError, match="ftp"):
        start_node(("ftp://x",), SMALL)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("out of\n  luck", "out of / luck"),
        ('of run\n  File "x.py", line 1, in y\n    z()\n    ^^^\nOSError: no files\n', "OSError: no files"),
    ],
)
def test_reports_the_stderr_of_a_node_that_does_not_start_without_its_stack(
    images, monkeypatch, tmp_path, written, said
):
    broken = tmp_path / "python"
    broken.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{written}\nEND\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(NodeUnreachable) as caught:
        start_node((images.as_uri(),), SMALL)
    assert str(caught.value) == f"the node did not start: {said}"


def test_a_node_killed_in_mid_answer_comes_back_at_its_address(images):
    with start_node((images.as_uri(),), SMALL) as node, transport_to(node) as transport:
        url = node.url
        answer = transport.features(request(images, 1, side=224))
        first = next(answer)
        assert len(first) > 0
        os.kill(node.pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            list(answer)
        until(lambda: node.pid == 0)
        with pytest.raises(Unavailable):
            transport.health()
        assert node.restart_if_dead()
        assert node.url == url
        assert sum(len(batch) for batch in transport.features(request(images, 1))) == 40
    assert node.pid == 0


PARENT = """
    import sys
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node
    node = start_node((sys.argv[1],), NodeSettings(memory_bytes=64 << 20))
    print(node.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_is_killed_leaves_no_node_behind(images, how):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), images.as_uri()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        pid = int(parent.stdout.readline())
        assert runs(pid)
        assert os.getpgid(pid) != os.getpgid(parent.pid)  # the terminal's Ctrl-C does not reach it
        parent.send_signal(how)
        parent.wait(60)
        until(lambda: not runs(pid))


@pytest.mark.parametrize("host", sampled(["0.0.0.0", "::"], usual=("0.0.0.0",)))
def test_a_node_that_other_machines_can_reach_needs_tenants_or_open(images, host):
    with pytest.raises(SettingError, match=r"other machines can reach what .*--tenants.*--allow-anonymous"):
        start_node((images.as_uri(),), SMALL, host=host)
    known = TenantSettings(name="ann", token_sha256=64 * "0")
    for settings in (replace(SMALL, allow_anonymous=True), replace(SMALL, tenants=(known,))):
        with start_node((images.as_uri(),), settings, host=host) as node:
            assert node.url


def test_a_loopback_address_needs_no_tenants(images):
    with start_node((images.as_uri(),), SMALL, host="localhost") as node:
        assert node.url.startswith("http://127.")


def test_a_node_that_ends_says_so_before_its_port_closes(images):
    with start_node((images.as_uri(),), SMALL) as node, transport_to(node) as transport:
        assert transport.health().trouble == ""
        answer = transport.features(request(images, 0))
        rows = len(next(answer))
        os.kill(node.pid, signal.SIGTERM)
        until(lambda: transport.health().trouble == "draining", timeout_s=1.0)
        with pytest.raises(NodeUnreachable, match="draining"):
            next(transport.features(request(images, 0)))
        assert rows + sum(len(batch) for batch in answer) == 40
    with transport_to(node) as transport, pytest.raises(Unavailable):
        transport.health()


def test_no_library_of_a_worker_prints_its_stack_for_which_it_may_find_no_memory(monkeypatch):
    """Rust's does so under a lock, and takes it again where it finds none."""
    monkeypatch.setenv(PLAIN, "1")  # a fork shows the variables of what it is a fork of
    monkeypatch.setenv("RUST_BACKTRACE", "full")
    for environment in (None, {"PATH": os.environ["PATH"], "RUST_BACKTRACE": "1"}):
        with Worker("json.tool", is_told=True, environment=environment) as worker:
            try:
                variables = Path(f"/proc/{worker.pid}/environ")
                until(variables.read_bytes)  # it has none for the moment in which its program is put in
                assert b"RUST_BACKTRACE=0" in variables.read_bytes().split(b"\0")
            finally:
                worker.kill()


KEYS = {
    **dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING", "GOOGLE_BEARER_TOKEN"), "hidden-1"),
    **dict.fromkeys(("FROSTLINE_CQL_PASSWORD", "HTTPS_PROXY", "DATABASE_URL", "HF_TOKEN", "some_api_key"), "hidden-2"),
}


def variables_of(pid):
    path = Path(f"/proc/{pid}/environ")
    until(path.read_bytes)  # it has none for the moment in which its program is put in
    return path.read_bytes()


def children():
    return {child for task in Path("/proc/self/task").iterdir() for child in children_of(task).split()}


@pytest.mark.promise("secret", mended="processes that ran strangers' networks had the keys of a node's environment")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the variables of a process")
@pytest.mark.usefixtures("plain_starts")
def test_what_runs_networks_of_strangers_has_no_keys_of_the_node(monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FROSTLINE_TOKEN", "hidden-3")
    bounds = {"limits": Limits(memory_bytes=1 << 30), "what": "it", "option": "--memory"}
    for module, reads_stores in (("training", False), ("listing", True)):
        process = BoundedProcess(STARTED[module], {}, token="of-a-tenant", reads_stores=reads_stores, **bounds)
        try:
            found = variables_of(process.pid)
        finally:
            process.end()
            process.close()
        assert b"FROSTLINE_TOKEN=of-a-tenant" in found.split(b"\0")
        assert (b"hidden-1" in found, b"hidden-2" in found, b"hidden-3" in found) == (reads_stores, reads_stores, False)
    with Inspector() as inspector:
        assert b"hidden" not in variables_of(inspector.pid)
    before, trials = children(), TrialProcess({}, 0)
    trials.warm()
    try:
        [trial] = children() - before
        assert b"hidden" not in variables_of(trial)
    finally:
        trials.close()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"])
def test_variables_that_are_no_keys_are_passed_on(name):
    assert without_keys({name: "x"}) == {name: "x"}
