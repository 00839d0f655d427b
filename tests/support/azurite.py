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
        about = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in about.items())]
        text = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"])
        signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
        headers = {**about, "Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
        connection = http.client.HTTPConnection(self.address, timeout=10)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=headers)
            status = connection.getresponse().status
        if status not in (201, 409):
            raise RuntimeError(f"Azurite answered {status} to the container {name}")


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
