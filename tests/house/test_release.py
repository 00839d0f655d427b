"""What is given away: a wheel that is the same whenever it is built, and a bill of what a node consists of."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

from support.deployed import ROOT

# Libraries under the LGPL, which are loaded as they are and may be replaced; nothing is under a stricter licence.
_LESSER = {"soxr"}


def built(folder, epoch):
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT, env={**os.environ, "SOURCE_DATE_EPOCH": epoch}, check=True, capture_output=True, timeout=200,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_that_is_built_twice_has_the_same_bytes(tmp_path):
    first, second = built(tmp_path / "first", "0"), built(tmp_path / "second", "0")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/frostline"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert names == {name.removeprefix("src/") for name in tracked}, "it holds the sources, and nothing of this machine"


@pytest.mark.parametrize("lock", ["node", "demo"])
def test_the_bill_names_each_package_of_the_lock_with_its_hashes_and_licence(lock):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "sbom.py"), lock],
        capture_output=True,
        check=True,
        text=True,
        timeout=200,
    )
    parts = json.loads(done.stdout)["components"]  # several versions of a package where Pythons differ
    found = {part["name"]: part for part in parts}
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    assert found.keys() == set(re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE))
    assert sum(len(part["hashes"]) for part in parts) == text.count("--hash=sha256:")
    here = {dist.metadata["Name"].lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    for name, part in found.items():
        assert part["hashes"], name
        if name in here:
            (licence,) = (each["license"]["name"] for each in part["licenses"])
            assert "GPL" not in licence or name in _LESSER, (name, licence)
            assert "General Public" not in licence, (name, licence)
