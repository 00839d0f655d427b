"""Set-ups that cannot work, each made for real: the examination names what is broken, and what to change."""

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from frostline import doctor
from frostline.control.settings import ControlTenant
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.core.system import __version__
from frostline.datasets import Dataset
from frostline.doctor import PROBLEM, WARNING, ExaminedSetup, examine
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.stores.cql.access import CqlAccess
from frostline.stores.protocols import RETRY_FOR, TIMEOUT
from frostline.training.settings import JobSettings
from support.commands import run, run_json
from support.control_planes import Clock, control_plane
from support.images import image_folder
from support.nodes import served
from support.servers import free_ports
from support.services import serving
from support.tenants import tenant, token_of

SMALL = "support.networks:Small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=4)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setenv(RETRY_FOR, "0.2")
    monkeypatch.setenv(TIMEOUT, "5")


def job(data, **fields):
    return JobSettings(**{"data": str(data), "model": SMALL, "until": "stem", **fields})


@pytest.fixture(autouse=True)
def _no_variables_of_the_tests(monkeypatch):
    """An examination names variables that nothing of Frostline reads."""
    monkeypatch.delenv("FROSTLINE_TESTS_COMPLETE", raising=False)


def found(data=None, *, nodes=(), network=False, token=None, **fields):
    """Findings that are not fine, of an examination, but for those of this machine, whose memory others use too."""
    subject = ExaminedSetup(
        nodes=nodes,
        data=None if data is None else job(data, near=next(iter(nodes), None), also_near=tuple(nodes[1:]), **fields),
        has_network=network,
        loader=LoaderSettings(token=token),
    )
    findings = (finding for finding in examine(subject, lambda _: None) if finding.part != "machine")
    return [finding for finding in findings if finding.level in (WARNING, PROBLEM)]


def the_one(findings, part):
    (finding,) = [finding for finding in findings if finding.part.startswith(part)]
    return finding


@contextmanager
def answering(health, date=None):
    """A server that answers as a node does, of which one thing is wrong."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = json.dumps(health if self.path == "/v1/health" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp=None):
            return date or super().date_time_string(timestamp)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


HEALTH = {"version": __version__, "host": "x", "hardware": "cpu", "memory_bytes": 1 << 30, "roots": [], "cores": []}
HEALTH |= {"protocol": [1, 1], "trouble": ""}


def test_finds_nothing_wrong_with_a_set_up_that_works(folder):
    node = Node(NodeSettings(memory_bytes=1 << 28, trial_s=0), (str(folder),))
    with node, served(node) as url:
        findings = list(
            examine(ExaminedSetup(nodes=(url,), data=job(folder, near=url), has_network=True), lambda _: None)
        )
    assert [finding for finding in findings if finding.level == PROBLEM] == []
    parts = {finding.part for finding in findings}
    assert {"machine", "accelerator", "cache folder", f"node {url}", "data", "samples", "network", "plan"} <= parts


def test_data_that_is_not_there():
    finding = the_one(found("/no/such/folder"), "data")
    assert finding.level == PROBLEM
    assert "/no/such/folder" in finding.says


def test_a_folder_without_any_sample(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    assert the_one(found(tmp_path), "data").level == PROBLEM


def test_all_samples_of_one_class(tmp_path):
    image_folder(tmp_path, per_class=2)
    for name in sorted(path.name for path in tmp_path.iterdir())[1:]:
        for image in (tmp_path / name).iterdir():
            image.unlink()
    finding = the_one(found(tmp_path), "data")
    assert "one class" in finding.says
    assert "--targets" in finding.mend


def test_a_class_of_one_sample(tmp_path):
    image_folder(tmp_path, per_class=3)
    first = min(path for path in tmp_path.iterdir() if path.is_dir())
    for image in sorted(first.iterdir())[1:]:
        image.unlink()
    assert first.name in the_one(found(tmp_path), "data").says


def test_splits_that_would_be_mixed(tmp_path):
    for split in ("train", "val"):
        image_folder(tmp_path / split, per_class=2)
    assert "mixed" in the_one(found(tmp_path), "data").says


def test_samples_that_cannot_be_decoded(tmp_path):
    image_folder(tmp_path, per_class=3)
    for image in sorted(tmp_path.rglob("*.*"))[::2]:
        image.write_bytes(b"no image at all")
    finding = the_one(found(tmp_path), "samples")
    assert finding.level == PROBLEM
    assert "5 of 9" in finding.says
    assert "index --check" in finding.mend


def test_a_store_that_nothing_serves(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    assert the_one(found("s3://photos"), "data").level == PROBLEM


def test_credentials_that_the_store_refuses_and_a_bucket_that_is_not_there(s3, monkeypatch, folder):
    s3.make_bucket("examined")
    s3.put_folder(folder, "examined")
    for name, value in s3.environment(secret="wrong").items():
        monkeypatch.setenv(name, value)
    finding = the_one(found("s3://examined"), "data")
    assert finding.level == PROBLEM
    assert "wrong" not in finding.says, "secrets stay out of sentences"
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    assert found("s3://examined") == []
    assert "no-such-bucket" in the_one(found("s3://no-such-bucket"), "data").says


def test_a_node_that_nobody_started(folder):
    (port,) = free_ports(1)
    finding = the_one(found(folder, nodes=(f"http://127.0.0.1:{port}",)), "node")
    assert finding.level == PROBLEM
    assert "frostline serve" in finding.mend


def test_an_address_that_is_none():
    assert the_one(found(nodes=("ftp://store",)), "node").level == PROBLEM


def test_a_list_of_nodes_that_cannot_be_read(tmp_path):
    assert the_one(found(nodes=(f"file://{tmp_path}/nodes.json",)), "node").level == PROBLEM


def test_a_node_of_another_version():
    with answering({**HEALTH, "version": "7.3.1", "protocol": [2, 4]}) as url:
        finding = the_one(found(nodes=(url,)), "node")
    assert "7.3.1" in finding.says
    assert "one version" in finding.mend


def test_a_node_that_is_not_ready():
    with answering({**HEALTH, "trouble": "draining"}) as url, answering(HEALTH) as other:
        finding = the_one(found(nodes=(url,)), "node")
        assert (finding.level, finding.says) == (PROBLEM, "it is not ready: draining")
        assert the_one(found(nodes=(url, other)), "node").level == WARNING


def test_nodes_that_hang_let_nobody_wait_for_one_after_the_other(monkeypatch):
    monkeypatch.setattr(doctor, "_NODE_DEADLINE_S", 1.0)
    with ExitStack() as stack:
        hanging = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        urls = tuple(f"http://127.0.0.1:{each.getsockname()[1]}" for each in hanging)
        began = time.monotonic()
        findings = found(nodes=urls)
        assert time.monotonic() - began < 6
    assert [finding.part for finding in findings if finding.level == PROBLEM] == [f"node {url}" for url in urls]


def test_a_server_that_is_no_node():
    with answering({"hello": "world"}) as url:
        assert "no node" in the_one(found(nodes=(url,)), "node").says


def test_a_clock_that_is_two_hours_away():
    with answering(HEALTH, date="Tue, 01 Jul 2025 08:00:00 GMT") as url:
        finding = the_one(found(nodes=(url,)), "node")
    assert finding.level == PROBLEM
    assert "clock" in finding.says
    assert "NTP" in finding.mend


def test_a_node_that_serves_other_data(folder, tmp_path):
    node = Node(NodeSettings(memory_bytes=1 << 28), (str(tmp_path),))
    with node, served(node) as url:
        finding = the_one(found(folder, nodes=(url,)), "node")
    assert f"--data-root {folder}" in finding.mend


def test_a_node_that_does_not_know_the_user(folder):
    settings = NodeSettings(memory_bytes=1 << 28, tenants=(tenant("somebody"),))
    node = Node(settings, (str(folder),))
    with node, served(node) as url:
        finding = the_one(found(nodes=(url,), token="wrong"), "node")
        assert finding.level == PROBLEM
        assert "FROSTLINE_TOKEN" in finding.says + (finding.mend or "")
        assert found(nodes=(url,), token=token_of("somebody")) == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "torchvision:resnet81"}, "did you mean resnet18"),
        ({"model": "no.such:thing"}, "cannot be imported"),
        ({"until": "sten"}, "did you mean stem"),
        ({"until": "fc"}, "nothing to train"),
        ({"weights": "/no/such/file.safetensors"}, "/no/such/file.safetensors"),
    ],
)
def test_a_network_that_cannot_be_made(folder, fields, says):
    finding = the_one(found(folder, network=True, **fields), "network")
    assert finding.level == PROBLEM
    assert says in finding.says


def test_a_network_that_cannot_be_cut_as_it_stands(folder):
    finding = the_one(found(folder, network=True, model="support.networks:Undecided", until="body"), "network")
    assert finding.level == WARNING
    assert "cannot trace" in finding.says


def test_devices_that_are_none(capsys):
    code, out, _ = run(capsys, "doctor", "--device", "cuda:0,cpu:1")
    assert code == 2
    assert "MEND  device:" in out


def test_frozen_layers_with_random_weights(folder):
    findings = found(folder, network=True, model="torchvision:shufflenet_v2_x0_5", until="features", weights="random")
    assert any("random weights" in finding.says and "--weights random" in finding.mend for finding in findings)


def test_a_node_without_memory_for_the_network(folder):
    node = Node(NodeSettings(memory_bytes=64 << 20, trial_s=0), (str(folder),))
    with node, served(node) as url:
        findings = found(folder, nodes=(url,), network=True, model="support.networks:Wide", until="body")
    assert any("memory" in finding.says for finding in findings), findings


def test_the_command_exits_with_2_and_says_what_to_change(capsys, folder):
    code, out, _ = run(capsys, "doctor", "--data", "/no/such/folder")
    assert code == 2
    assert "MEND  data:" in out
    assert "something to change" in out
    assert run_json(capsys, "doctor", "--data", folder)["verdict"] == "fine"


def test_the_command_examines_no_network_without_samples(capsys):
    code, _, err = run(capsys, "doctor", "--model", SMALL)
    assert code == 2
    assert "--data" in err


def test_a_library_that_was_built_for_another_pytorch(folder, monkeypatch):
    def unfit(_):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("frostline.training.pretrained.importlib.import_module", unfit)
    finding = the_one(found(folder, network=True, model="torchvision:resnet18"), "network")
    assert "belongs to this PyTorch" in finding.says


def node_serving(root):
    return Node(NodeSettings(memory_bytes=1 << 28, trial_s=0), (str(root),))


@pytest.mark.parametrize("said", ["[]", '{"nodes": []}', '[""]', "nothing"])
def test_a_list_that_names_no_node(tmp_path, folder, said):
    (tmp_path / "nodes.json").write_text(said)
    finding = the_one(found(folder, nodes=(f"file://{tmp_path}/nodes.json",)), "node")
    assert finding.level == PROBLEM


def test_one_dead_node_of_two_is_worth_a_look_and_of_one_stops_a_job(capsys, folder):
    (port,) = free_ports(1)
    dead = f"http://127.0.0.1:{port}"
    with node_serving(folder) as node, served(node) as url:
        finding = the_one(found(folder, nodes=(dead, url)), "node")
        code, out, _ = run(capsys, "doctor", "--data", folder, "--near", url, "--near", dead)
    assert finding.level == WARNING
    assert "a job leaves it out, and has 1 of 2 nodes" in finding.says
    assert code == 0
    assert "a job can run; 1 of" in out
    assert the_one(found(folder, nodes=(dead,)), "node").level == PROBLEM


def test_a_node_whose_mount_is_empty(tmp_path):
    mount = image_folder(tmp_path / "images", per_class=4)
    with node_serving(mount) as node, served(node) as url:
        assert found(mount, nodes=(url,)) == []
        assert len(Dataset(mount)) == 12
        for image in mount.rglob("*.jpg"):
            image.rename(tmp_path / image.name)
        finding = the_one(found(mount, nodes=(url,), relist=False), "node")
    assert finding.level == PROBLEM
    assert "cannot read" in finding.says
    assert "mount" in finding.mend


def test_a_node_that_may_not_read_the_data_of_two_is_worth_a_look(folder, tmp_path):
    with node_serving(tmp_path) as other, served(other) as away, node_serving(folder) as node, served(node) as url:
        finding = the_one(found(folder, nodes=(away, url)), f"node {away}")
    assert finding.level == WARNING
    assert "--data-root" in finding.mend


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP"])
@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_folder_for_temporary_files_that_is_none(monkeypatch, folder, tmp_path, name, kind):
    place = tmp_path / "there"
    if kind == "a file":
        place.write_text("")
    monkeypatch.setenv(name, str(place))
    finding = the_one(found(folder), "temporary files")
    assert finding.level == PROBLEM
    assert name in finding.says
    assert str(place) in finding.says
    monkeypatch.setenv(name, str(tmp_path))
    assert found(folder) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:PORT", "http://no-such.invalid:7075", "nonsense", "ftp://x:1"])
def test_a_control_plane_that_is_none(monkeypatch, folder, url):
    (port,) = free_ports(1)
    monkeypatch.setenv("FROSTLINE_CONTROL", url.replace("PORT", str(port)))
    finding = the_one(found(folder), "control plane")
    assert finding.level == PROBLEM
    assert "FROSTLINE_CONTROL" in finding.mend


def test_a_control_plane_that_answers_and_what_is_none(monkeypatch, folder, tmp_path):
    with node_serving(folder) as node, served(node) as url:
        monkeypatch.setenv("FROSTLINE_CONTROL", url)
        assert found(folder) == [], "a node has one"
    with answering(HEALTH) as url:
        monkeypatch.setenv("FROSTLINE_CONTROL", url)
        assert the_one(found(folder), "control plane").level == PROBLEM
    monkeypatch.setenv("FROSTLINE_CONTROL", "none")
    assert found(folder) == []
    ann = ControlTenant(name="ann", token_sha256=tenant("ann").token_sha256)
    with control_plane(tmp_path, Clock(), tenants=(ann,)) as (url, state):
        monkeypatch.setenv("FROSTLINE_CONTROL", url)
        finding = the_one(found(folder), "control plane")
        assert "FROSTLINE_TOKEN" in finding.says
        monkeypatch.setenv("FROSTLINE_TOKEN", token_of("ann"))
        assert found(folder, token=token_of("ann")) == []
        assert state.records == [], "it heard of no stage"


@pytest.mark.parametrize("url", ["unix:///no/such/io.sock", "nonsense", "tcp://127.0.0.1:1", "unix://FOLDER/file"])
def test_an_io_service_that_is_none(monkeypatch, folder, tmp_path, url):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FROSTLINE_IO", url.replace("FOLDER", str(tmp_path)))
    finding = the_one(found(folder), "I/O service")
    assert finding.level == PROBLEM
    assert "FROSTLINE_IO" in finding.mend
    with node_serving(folder) as node, served(node) as near:
        assert found(folder, nodes=(near,)) == [], "a job that names a node asks none"


def test_an_io_service_that_is_named_as_a_node(folder, tmp_path):
    with node_serving(folder) as node:
        with serving(LocalTransport(node)) as (_, url):
            assert found(folder, nodes=(url,)) == []
        lost = the_one(found(folder, nodes=(f"unix://{tmp_path}/io.sock",)), "node unix:")
    assert lost.level == PROBLEM
    assert "frostline io" in lost.mend


def test_certificates_that_are_nowhere(monkeypatch, folder, tmp_path):
    monkeypatch.setenv("FROSTLINE_TLS_CA", str(tmp_path / "ca.pem"))
    finding = the_one(found(folder), "certificates")
    assert finding.level == WARNING
    assert "ca.pem" in finding.says
    assert "unset that variable" in finding.mend


def test_a_variable_that_nothing_reads(monkeypatch, folder):
    monkeypatch.setenv("FROSTLINE_CONTORL", "http://127.0.0.1:1")
    finding = the_one(found(folder), "environment")
    assert finding.level == WARNING
    assert finding.says.startswith("nothing reads the variable FROSTLINE_CONTORL; did you mean FROSTLINE_CONTROL")
    monkeypatch.delenv("FROSTLINE_CONTORL")
    monkeypatch.setenv("FROSTLINE_STORE_RETRY_FOR", "3")
    finding = the_one(found(), "stores")
    assert finding.level == PROBLEM
    assert finding.says.startswith(
        "nothing reads the variable FROSTLINE_STORE_RETRY_FOR; did you mean FROSTLINE_STORE_RETRY"
    )
    with pytest.raises(SettingError, match="nothing reads the variable FROSTLINE_CQL_PASWORD; did you mean"):
        CqlAccess.of({"FROSTLINE_CQL_PASWORD": "secret"})


def test_samples_without_a_label(tmp_path):
    for number in range(3):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "labels.csv").write_text("file_name,label\n0.png,x\n1.png,y\n")
    [bare] = [finding for finding in found(str(tmp_path)) if finding.says == "1 of 3 samples have no label"]
    assert (bare.level, bare.mend) == (WARNING, "leave them out (--where 'label is not None')")


@pytest.mark.parametrize(("name", "value"), [("TIMEOUT_S", "soon"), ("RETRY_FOR_S", "-1"), ("REQUESTS_PER_S", "0")])
def test_bounds_of_stores_that_make_no_sense(monkeypatch, folder, name, value):
    monkeypatch.setenv(f"FROSTLINE_STORE_{name}", value)
    finding = the_one(found(), "stores")
    assert finding.level == PROBLEM
    assert name in finding.says
