"""Trainers on systems that lack what Linux alone has, as macOS does: all of it is taken away before Frostline comes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.images import image_folder

WITHOUT = """
import importlib, json, sys

for module, names in {
    "mmap": ("MADV_HUGEPAGE", "MAP_NORESERVE", "MAP_POPULATE", "MAP_STACK"),
    "os": (
        "MFD_ALLOW_SEALING", "MFD_CLOEXEC", "SCHED_BATCH", "SCHED_OTHER", "eventfd", "memfd_create", "pidfd_open",
        "posix_fadvise", "sched_getaffinity", "sched_getscheduler", "sched_setaffinity", "sched_setscheduler",
    ),
    "select": ("EPOLLIN", "EPOLLRDHUP", "epoll"),
    "socket": ("SO_PEERCRED", "TCP_KEEPIDLE"),
}.items():
    for name in names:
        vars(importlib.import_module(module)).pop(name, None)
sys.modules["fcntl"] = None

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import SettingError
from frostline.loaders import WorkerLoader
from support.images import tiny_preprocess

data, near = fl.Dataset(sys.argv[1]), sys.argv[2]
settings = LoaderSettings(samples_per_request=8, skip_allowance=0.1)
said = {}

for place in ("", near):
    with fl.offload(None, data, preprocess=tiny_preprocess(), near=place or None, settings=settings) as job:
        said["over a node" if place else "here"] = {
            "arrays": sum(map(len, job.arrays(8))),
            "loader": sum(map(len, job.loader(8, shuffle=True))),
            "workers": sum(map(len, WorkerLoader(job.loader(8, epoch=1), 2, start="fork"))),
            "skipped": [sample.object for sample in job.statistics().skipped],
        }

from support.networks import Small

model = fl.freeze(Small().train(), "stem", input_shape=(3, 32, 32))
with fl.offload(model, data, preprocess=tiny_preprocess(), near=near, settings=settings) as job:
    said["trained on"] = sum(len(job.head(batch.features)) for batch in job.loader(8))

for name, ask in {
    "lock": lambda: fl.stores.objects.local.FolderStore(sys.argv[1]).alone().__enter__(),
    "service": lambda: fl.offload(None, data, near="unix:///run/frostline/io.sock"),
}.items():
    try:
        ask()
    except SettingError as error:
        said[name] = str(error)
import frostline.cli.commands
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(shared_node, tmp_path_factory):
    """What one process found: a new one imports torch, which takes most of its time."""
    folder = image_folder(tmp_path_factory.mktemp("images"), per_class=8)
    (folder / "noise" / "003.jpg").write_bytes(b"no image")
    command = [sys.executable, "-c", WITHOUT, str(folder), shared_node.url]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("place", ["over a node", "here"])
def test_a_plain_loader_reads_and_its_workers_and_their_skipped_samples_are_counted(said, place):
    assert said[place] == {"arrays": 23, "loader": 23, "workers": 23, "skipped": ["noise/003.jpg"]}


def test_a_network_is_cut_and_its_head_trained_over_a_node(said):
    assert said["trained on"] == 23


def test_explains_what_the_operating_system_lacks(said):
    assert "no locks of files" in said["lock"]
    assert "only Linux has" in said["service"]
