"""Ceph's object gateway over one monitor and one disk in memory, on free loopback ports, stopped by process id."""

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.servers import free_ports, listens, served, wait_until

__all__ = ("Ceph", "ceph", "find_ceph")

_ROOT = Path(__file__).parents[2] / "build/ceph/root"
_KEY, _SECRET = "testkey", "testsecret"
_USER = ["user", "create", "--uid=test", "--display-name=test", f"--access-key={_KEY}", f"--secret={_SECRET}"]
_SETTINGS = """[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{port}
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
osd objectstore = memstore
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
crash dir = {folder}
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
keyring = /dev/null
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1
rgw run sync thread = false
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceph:
    """A running gateway.

    Attributes:
        address: host and port.
    """

    address: str

    def environment(self, *, secret: str = _SECRET) -> dict[str, str]:
        """The variables under which an S3 client finds the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket; making it again does nothing."""
        import botocore.session  # which takes long to import, and most runs have no Ceph

        client = botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=f"http://{self.address}",
            aws_access_key_id=_KEY,
            aws_secret_access_key=_SECRET,
        )
        with contextlib.closing(client):
            client.create_bucket(Bucket=name)


def find_ceph() -> Path | None:
    """Where its programs are, as ``scripts/ceph.sh`` unpacks them; None where they are not."""
    return _ROOT if (_ROOT / "usr/bin/radosgw").exists() else None


@contextlib.contextmanager
def ceph(folder: Path, *, ready_within_s: float = 200.0) -> Iterator[Ceph]:
    """Run one, which keeps its data in memory, until the block ends.

    Raises:
        RuntimeError: it was not ready in time.
    """
    port, gateway = free_ports(2)
    libraries = _ROOT / "usr/lib/x86_64-linux-gnu"
    for part in ("mon", "osd", "rgw"):
        (folder / part).mkdir()
    fsid = str(uuid.uuid4())
    settings = _SETTINGS.format(fsid=fsid, port=port, gateway=gateway, libraries=libraries, folder=folder)
    (folder / "ceph.conf").write_text(settings, encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/ceph:{_ROOT}/lib/x86_64-linux-gnu",
        "PYTHONPATH": str(_ROOT / "usr/lib/python3/dist-packages"),
    }

    def command(program: str, *arguments: str) -> list[str]:
        # Its own libraries are for the system's Python.
        python = ["/usr/bin/python3"] if program == "ceph" else []
        return [*python, f"{_ROOT}/usr/bin/{program}", "-c", f"{folder}/ceph.conf", *arguments]

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            command(program, *arguments), check=True, capture_output=True, text=True, env=environment, timeout=60
        )
        return done.stdout

    def disk_is_up() -> bool:
        return json.loads(run("ceph", "osd", "stat", "--format", "json"))["num_up_osds"] == 1

    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{port}]", f"{folder}/monmap")
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap")
    with contextlib.ExitStack() as stack:
        how = {"within_s": ready_within_s, "environment": environment}
        monitor = command("ceph-mon", "-i", "a", "-f")
        stack.enter_context(served(monitor, folder / "mon.words", lambda: listens(port), **how))
        disk = str(uuid.uuid4())
        run("ceph", "osd", "new", disk)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        _start_disk(command("ceph-osd", "-i", "0", "-f"), environment, disk_is_up, ready_within_s, stack)
        run("radosgw-admin", *_USER)
        server = command("radosgw", "-n", "client.rgw", "-f")
        stack.enter_context(served(server, folder / "rgw.words", lambda: listens(gateway), **how))
        yield Ceph(address=f"127.0.0.1:{gateway}")


def _start_disk(command, environment, is_up, within_s, stack) -> None:
    """The first time a new disk may end as soon as it has told the monitor of itself; the second time it stays."""
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        stack.callback(process.wait)
        stack.callback(process.kill)
        if wait_until(is_up, process, within_s):
            return
    raise RuntimeError("Ceph's disk did not come up")
