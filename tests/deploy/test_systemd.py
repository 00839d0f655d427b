"""The service of systemd: options of the node, a unit that systemd takes, and a narrow sandbox."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from support.deployed import DEPLOY, gibibytes, served_by

FOLDER = DEPLOY / "systemd"
UNIT = (FOLDER / "frostline.service").read_text()
DROP_INS = sorted((FOLDER / "frostline.service.d").glob("*.example"))


def said(text, name):
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def command(text, below=""):
    """The command with its variables, as the unit and a drop-in set them."""
    variables = dict(
        word.split("=", 1) for line in said(below + "\n" + text, "Environment") for word in shlex.split(line)
    )
    (line,) = [line for line in said(text, "ExecStart") if line]
    variables["DATA_ROOT"] = "/"  # the verb looks that a folder is there
    return [re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word) for word in shlex.split(line)]


def test_the_node_takes_the_options():
    program, *arguments = command(UNIT)
    assert program == "/opt/frostline/bin/frostline"
    served = served_by(arguments)
    assert served["listen"] == "127.0.0.1:7070"
    assert str(served["tenants"]) == "%d/tenants.toml"
    assert said(UNIT, "LoadCredential") == ["tenants.toml:/etc/frostline/tenants.toml"]


def test_a_drop_in_that_has_a_command_of_its_own_changes_the_device_alone():
    own = [path for path in DROP_INS if "ExecStart" in path.read_text()]
    assert len(own) == 1
    changed = command(own[0].read_text(), UNIT)
    at = changed.index("--device")
    assert changed[at + 1] == "cuda"
    assert changed[:at] + changed[at + 2 :] == command(UNIT)


def test_writes_to_its_cache_folder_alone():
    assert said(UNIT, "ProtectSystem") == ["strict"]
    (folder,) = said(UNIT, "CacheDirectory")
    _, *arguments = command(UNIT)
    served = served_by(arguments)
    for path in (served["cache_folder"], *re.findall(r"XDG_CACHE_HOME=(\S+)", UNIT)):
        assert path.startswith(f"%C/{folder}")


@pytest.mark.parametrize("text", [UNIT, (FOLDER / "frostline.service.d" / "10-store.conf.example").read_text()])
def test_the_limit_of_memory_leaves_room_for_what_comes_on_top_of_the_nodes(text):
    (limit,), (memory,) = said(text, "MemoryMax"), re.findall(r"MEMORY=(\S+)", text)
    assert gibibytes(limit) >= 1.5 * gibibytes(memory) + 4


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_takes_the_unit_with_each_drop_in(tmp_path):
    for number, path in enumerate((None, *DROP_INS)):
        folder = tmp_path / str(number)
        (folder / "frostline.service.d").mkdir(parents=True)
        (folder / "frostline.service").write_text(_runnable(UNIT))
        if path is not None:
            (folder / "frostline.service.d" / path.stem).write_text(_runnable(path.read_text()))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(folder / "frostline.service")],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert (done.returncode, done.stderr) == (0, "")


def _runnable(text):
    # It looks that the program is there, and Frostline is not in /opt.
    return text.replace("/opt/frostline/bin/frostline", sys.executable)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_counts_little_exposure():
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(FOLDER / "frostline.service")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250, and judges only services that are loaded")
    assert done.returncode == 0, done.stdout.splitlines()[-1]
