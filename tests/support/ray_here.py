"""A Ray of this machine for tests, with nodes under it, in processes beside the tests' own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from support.cassandra import PASSWORD

ROOT = Path(__file__).resolve().parents[2]
NODE = ("--memory", "256MiB", "--trials", "0", "--device-batch", "8", "--threads", "1")


class RayHere:
    """Commands that see the Ray of a folder for temporary files."""

    def __init__(self, folder):
        # Sockets need a short path, and who tests may have nodes of their own.
        self.environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
            self.environment.pop(name, None)
        # Tasks write to stores that ask for passwords, and Ray's processes have the environment that Ray began with.
        self.environment["FROSTLINE_CQL_PASSWORD"] = PASSWORD
        # Whoever called ``ray.init()`` once has one in their home, of a Ray that is none of ours.
        self.environment["RAY_AUTH_TOKEN"] = "0" * 64
        self.state = folder / f"frostline-ray-{os.geteuid()}" / "head.json"

    @property
    def address(self):
        return json.loads(self.state.read_text())["address"]

    def is_running(self):
        return self.state.exists()

    def cluster(self, *arguments):
        """What a verb of ``frostline cluster`` says as JSON."""
        return json.loads(self.python("-c", "from frostline.cli import main; main()", "cluster", *arguments, "--json"))

    def node(self, number, namespace="frostline"):
        return self.cluster("status", "--namespace", namespace)["nodes"][str(number)]

    def python(self, *arguments, **environment):
        """What Python writes to stdout; it must end well."""
        return self._ran(*arguments, **environment).stdout

    def _ran(self, *arguments, **environment):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    def script(self, code, *arguments):
        """What some code writes that joins Ray itself."""
        return self.script_that_says(code, *arguments)[0]

    def script_that_says(self, code, *arguments):
        """The same, and what it writes to stderr."""
        joined = {"RAY_ADDRESS": self.address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        done = self._ran("-c", code, *arguments, **joined)
        return done.stdout, done.stderr


@contextmanager
def ray_here():
    """Ray is started by the first ``cluster up``, and ended with all nodes."""
    with scratch_folder() as folder:
        here = RayHere(Path(folder))
        try:
            yield here
        finally:
            if here.is_running():
                os.kill(json.loads(here.state.read_text())["pid"], 15)


@contextmanager
def scratch_folder():
    """A folder with a path that is short enough for sockets."""
    folder = tempfile.mkdtemp(prefix="fl-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parent_of(pid):
    """The process that started another one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers_of_ray(title):
    """Processes of the Ray of this folder for temporary files that run what is called so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_named = (folder / "cmdline").read_bytes().startswith(title.encode())
            raylet = Path(f"/proc/{parent_of(folder.name)}/cmdline").read_bytes() if is_named else b""
        except OSError:
            continue  # it has just ended
        if tempfile.gettempdir().encode() in raylet:
            found.append(int(folder.name))
    return found


def awaited_workers_of_ray(title):
    """The same, looked for until some run; none where none does for as long as that takes."""
    return next(filter(None, (workers_of_ray(title) for _ in range(100))), [])
