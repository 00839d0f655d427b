"""Azurite, Microsoft's own emulator of Azure's blob storage, on a free loopback port, stopped by process id."""

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

from support.servers import free_ports, listens, served

__all__ = ("Azurite", "azurite", "find_azurite")

_ACCOUNT = "devstoreaccount1"
_KEY = base64.b64encode(b"a key of these tests alone").decode()
_PROGRAM = Path(__file__).parents[2] / "build/azurite/node_modules/azurite/dist/src/blob/main.js"


@dataclass(frozen=True, slots=True, kw_only=True)
class Azurite:
    """A running emulator.

    Attributes:
        address: host and port.
    """

    address: str

    def environment(self) -> dict[str, str]:
        """The variables under which a client of Azure finds it."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://{self.address}/{_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def make_container(self, name: str) -> None:
        """Make a container; making it again does nothing."""
        # Signed by hand: the driver of stores makes none.
        self._put(name, "restype:container", b"", {}, (201, 409))

    def put(self, path: str, data: bytes) -> None:
        """Put a blob at ``container/name``, whatever its name."""
        self._put(path, "", data, {"x-ms-blob-type": "BlockBlob"}, (201,))

    def _put(self, path: str, asked: str, data: bytes, about: dict[str, str], statuses: tuple[int, ...]) -> None:
        path = quote(path)
        headers = {**about, "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        length = str(len(data)) if data else ""
        lines = ["PUT", "", "", length, *[""] * 8, *(f"{key}:{value}" for key, value in sorted(headers.items()))]
        text = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{path}", *([asked] if asked else [])])
        signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
        headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": str(len(data))}
        connection = http.client.HTTPConnection(self.address, timeout=10)
        with contextlib.closing(connection):
            query = f"?{asked.replace(':', '=')}" if asked else ""
            connection.request("PUT", f"/{_ACCOUNT}/{path}{query}", data, headers=headers)
            status = connection.getresponse().status
        if status not in statuses:
            raise RuntimeError(f"Azurite answered {status} to {path}")


def find_azurite() -> Path | None:
    """Its program, as ``scripts/azurite.sh`` installs it; None where there is none, or no Node.js."""
    return _PROGRAM if _PROGRAM.exists() and shutil.which("node") else None


@contextlib.contextmanager
def azurite(folder: Path, *, ready_within_s: float = 200.0) -> Iterator[Azurite]:
    """Run one, which keeps its data in memory, until the block ends.

    Raises:
        RuntimeError: it was not ready in time.
    """
    (port,) = free_ports(1)
    command = [
        "node", str(find_azurite()), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence",
        "--skipApiVersionCheck", "--silent", "--disableTelemetry",
    ]  # fmt: skip
    environment = {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}", "PATH": str(Path(shutil.which("node")).parent)}
    log = folder / "azurite.log"
    with served(command, log, lambda: listens(port), within_s=ready_within_s, environment=environment):
        yield Azurite(address=f"127.0.0.1:{port}")
