"""The image: a node's own options and paths, no right of root, and packages by their hashes."""

import http.server
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from frostline.core.config import NodeSettings, ServerTls
from frostline.node.process import start_node
from frostline.wire.tls import Authority
from support.deployed import DEPLOY, ROOT, refusal
from support.servers import free_ports

FILE = (DEPLOY / "container" / "Dockerfile").read_text()
HEALTHY = DEPLOY / "container" / "healthy.py"


def instructions(name):
    """What stands behind each instruction of a name; lines that go on are one."""
    joined = FILE.replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def words(text):
    return re.findall(r'"([^"]*)"', text)


def is_healthy(url, *certificate):
    return subprocess.run([sys.executable, "-I", str(HEALTHY), url, *certificate], timeout=200).returncode == 0


@contextmanager
def answering(status):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/health"
        server.shutdown()


def test_the_command_alone_ends_with_the_name_of_the_option_that_is_missing():
    assert words(instructions("ENTRYPOINT")[0]) == ["frostline"]
    assert "--data-root" in refusal(words(instructions("CMD")[0]))


def test_listens_where_the_image_says_and_its_health_check_asks():
    (command,), (port,) = instructions("CMD"), instructions("EXPOSE")
    assert words(command)[-1].endswith(f":{port}")
    assert f'"http://127.0.0.1:{port}/v1/health"' in instructions("HEALTHCHECK")[0]


def test_packages_are_wheels_by_hash_and_torch_is_the_makefiles():
    torch = re.search(r"^TORCH := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert f"TORCH={torch}" in instructions("ARG")
    locked = [line for line in instructions("RUN") if "requirements/node.txt" in line]
    assert [{"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(line.split()) for line in locked] == [True]


def test_runs_as_a_user_who_is_not_root_and_keeps_no_tools_of_the_build():
    assert len(instructions("FROM")) == 2
    assert instructions("USER") == ["10001:10001"]
    last_stage = FILE.rpartition("\nFROM ")[2]
    assert "--uid 10001" in last_stage
    assert "pip" not in last_stage


def test_what_it_copies_is_there_and_not_left_out_of_the_context():
    context = (DEPLOY / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    assert context[0] == "*"
    for line in instructions("COPY"):
        *sources, _ = line.split()
        for source in () if sources[0].startswith("--from") else sources:
            assert (ROOT / source).exists()
            assert f"!{source}" in context


def test_a_node_is_healthy_with_tenants_and_without_and_nothing_else_is():
    for status, expected in (200, True), (401, True), (500, False), (404, False):
        with answering(status) as url:
            assert is_healthy(url) == expected, status
    (port,) = free_ports(1)
    assert not is_healthy(f"http://127.0.0.1:{port}/v1/health")


def test_a_real_node_that_encrypts_is_healthy_for_whom_it_trusts(tmp_path):
    authority = Authority(tmp_path / "authority")
    cert, key = map(str, authority.issue(["127.0.0.1"]))
    for client_ca, certificate, expected in (
        (None, (), True),
        (str(authority.ca), (cert, key), True),
        (str(authority.ca), (), False),
    ):
        tls = ServerTls(cert=cert, key=key, client_ca=client_ca)
        with start_node((tmp_path.as_uri(),), NodeSettings(memory_bytes=64 << 20, tls=tls)) as node:
            assert is_healthy(f"{node.url}/v1/health", *certificate) == expected
            assert not is_healthy(node.url.replace("https:", "http:") + "/v1/health")


def test_a_real_node_is_healthy(tmp_path):
    with start_node((tmp_path.as_uri(),), NodeSettings(memory_bytes=64 << 20)) as node:
        assert is_healthy(f"{node.url}/v1/health")
        assert not is_healthy(f"{node.url}/health")


@pytest.mark.parametrize("package", ["openvino", "obstore", "cassandra-driver", "botocore", "tokenizers", "soundfile"])
def test_a_deployed_node_has_what_stores_and_samples_need(package):
    assert re.search(rf"^{package}==", (ROOT / "requirements" / "node.txt").read_text(), re.MULTILINE)
