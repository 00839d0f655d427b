"""What is given away: a wheel, a bill of what a node consists of, the README's first screen, and a release."""

import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from support.deployed import ROOT
from support.torchvision_cpu import sitecustomize

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


def tool(name):
    return runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))


def test_the_first_screen_that_a_wheel_runs_is_the_readmes_near_a_node_that_is_there():
    wheel = tool("first_screen")
    loop = wheel["loop_of"]((ROOT / "README.md").read_text(encoding="utf-8"))
    found = wheel["stranger"](loop, "http://127.0.0.1:7", random_weights=True)
    assert compile(found, "loop", "exec")
    network, job = found.splitlines()[1:3]
    assert network.endswith('timm.create_model("resnet18", pretrained=False, num_classes=3), until="features")')
    assert job.startswith('job = fl.offload(model, "photos", near="http://127.0.0.1:7")')
    with pytest.raises(SystemExit, match="names no node"):
        wheel["stranger"](found, "http://127.0.0.1:7", random_weights=True)


@pytest.mark.timeout(600)  # it installs, serves, trains twice, and other tests run beside it
@pytest.mark.usefixtures("plain_starts")
def test_a_wheel_in_an_empty_environment_runs_the_readmes_first_screen_and_the_demo():
    sites = (Path(sitecustomize.__file__).parent, sysconfig.get_path("purelib"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "first_screen.py"), "--random-weights"]
        + [word for site in sites for word in ("--site", str(site))],
        capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("the README's first screen and the demo run from the wheel\n")


def test_a_release_dates_what_was_unreleased_and_numbers_the_code():
    release = tool("release")
    now = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    then = release["released"](now, "0.9.0", "2030-01-31")
    assert "Nothing has been released" not in then
    assert "## [Unreleased]\n\n## [0.9.0] - 2030-01-31\n\n### Added" in then
    assert then.partition("## [0.9.0] - 2030-01-31\n")[2] == now.partition("## [Unreleased]\n")[2]
    with pytest.raises(SystemExit, match="nothing that is unreleased"):
        release["released"](then, "0.9.1", "2030-02-01")
    with pytest.raises(SystemExit, match=r"a version 0\.9\.0 already"):
        release["released"](then, "0.9.0", "2030-02-01")
    source = release["VERSION"].read_text(encoding="utf-8")
    assert '__version__ = "0.9.0"' in release["numbered"](source, "0.9.0")
    with pytest.raises(SystemExit, match="no version"):
        release["numbered"]("nothing", "0.9.0")


def test_a_release_numbers_the_citation_and_updates_the_readme():
    release = tool("release")
    now = release["CITATION"].read_text(encoding="utf-8")
    then = release["cited"](now, "0.9.0", "2030-01-31")
    cited = yaml.safe_load(then)
    assert (cited["version"], str(cited["date-released"])) == ("0.9.0", "2030-01-31")
    assert yaml.safe_load(release["cited"](then, "0.9.1", "2030-02-01"))["version"] == "0.9.1"
    assert then.count("date-released") == release["cited"](then, "0.9.1", "2030-02-01").count("date-released") == 1
    with pytest.raises(SystemExit, match="no version"):
        release["cited"]("nothing", "0.9.0", "2030-01-31")
    readme = release["installed"](release["README"].read_text(encoding="utf-8"))
    assert 'pip install "frostline[torch]" timm\n' in readme
    assert "before the first release" not in readme


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.y*ml")), ids=lambda path: path.name)
def test_what_github_reads_is_yaml_without_a_key_twice(path):
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader, node):
        names = [loader.construct_object(key) for key, _ in node.value]
        assert len(names) == len(set(names)), f"{path}: a key comes twice in {names}"
        return dict(zip(names, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert yaml.load(path.read_text(encoding="utf-8"), Strict), "it says something"


def test_each_job_of_a_workflow_runs_what_is_there():
    targets = dict(re.findall(r"^([a-z-]+):(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for path in (ROOT / ".github" / "workflows").glob("*.yaml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow[True], f"{path.name}: nothing begins it"  # `on` is true in YAML 1.1
        for name, job in workflow["jobs"].items():
            assert job["runs-on"], name
            assert job["timeout-minutes"], f"{name} may hang for six hours"
            for step in job["steps"]:
                assert len({"run", "uses"} & step.keys()) == 1, f"{name}: a step runs or uses something"
                assert re.fullmatch(r"[\w.-]+/[\w./-]+@v\d[\w.]*", step.get("uses", "a/b@v1")), step
                for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                    assert "install" in targets.get(target, ""), f"{name}: make {target} finds no environment there"
                for found in re.findall(r"pip install \"\.\[([\w,]+)\]\"", step.get("run", "")):
                    assert set(found.split(",")) <= extras.keys(), f"{name}: pip install .[{found}]"
                for file in re.findall(r"(?:^|\s)(\.ci/\w+|scripts/[\w.]+|tests/\w+)", step.get("run", "")):
                    assert (ROOT / file).exists(), f"{name}: {file}"
