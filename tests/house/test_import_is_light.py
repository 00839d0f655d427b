"""Importing Frostline costs little, and loading data costs no framework that does not ask for it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from frostline.core.config import IoSettings, NodeSettings
from frostline.io_service.handler import Upstream
from frostline.io_service.start import start_io
from support.images import image_folder
from support.nodes import artifact_of, make_images, small_network

pytestmark = pytest.mark.usefixtures("plain_starts")

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ("cassandra", "matplotlib", "scipy", "sympy", "torch")
"""What a loop of another framework, or of none, has no use of; pandas is not ours to say: pyarrow imports it."""

LIGHT = (
    "frostline",
    "frostline.loaders",
    "frostline.loaders.epoch_loader",
    "frostline.cli.io",
    "frostline.cli.commands",
    "frostline.io_service.service",
    "frostline.node.service",
    "frostline.client.http",
)
"""What needs none of these to be imported."""


def ran(code, *arguments, **environment):
    """What a new process imported of the heavy ones while it ran some code, which must succeed."""
    end = f"\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    process = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}{end}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_torch_is_not_imported_until_it_is_needed():
    code = f"""
import importlib
for name in {LIGHT}:
    importlib.import_module(name)
    heavy = [heavy for heavy in {HEAVY} if heavy in sys.modules]
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    assert ran(code) == []


# What Python lacks on Windows, as its documentation says; torch, which knows that by itself, is imported before.
UNIX_ALONE = """
import importlib, torch
for module in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules[module] = None
for module, names in {
    "os": ("fchmod", "fork", "geteuid", "killpg", "nice", "register_at_fork", "sched_getaffinity", "sysconf"),
    "select": ("EPOLLIN", "EPOLLRDHUP", "epoll"),
    "signal": ("SIGHUP", "SIGKILL", "SIGSTOP", "pthread_sigmask"),
    "socket": ("AF_UNIX", "SO_PEERCRED", "TCP_KEEPIDLE", "recv_fds", "send_fds"),
}.items():
    for name in names:
        vars(importlib.import_module(module)).pop(name, None)
for name in ("client.http", "cli.train", "datasets", "engines.openvino", "io_service.client", "jobs.offload",
             "training.run"):
    importlib.import_module(f"frostline.{name}")
"""


def test_a_trainers_side_is_imported_where_python_has_nothing_of_unix():
    assert "torch" in ran(UNIX_ALONE)


def test_pip_is_asked_for_nothing_that_cannot_be_installed_on_windows():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [uvloop] = [Requirement(line) for line in wanted["dependencies"] if line.startswith("uvloop")]
    assert uvloop.marker is not None
    assert not uvloop.marker.evaluate({"sys_platform": "win32"})
    assert uvloop.marker.evaluate({"sys_platform": "darwin"})


PLAIN = """
import frostline as fl
data = fl.Dataset(sys.argv[1])
with fl.offload(None, data, near=sys.argv[2] or None) as job:
    for loader in job.arrays(4, shuffle=True), job.arrays(5), *fl.Epochs(job.arrays(4), range(1, 3)):
        batches = list(loader)
        assert sum(len(batch.ids) for batch in batches) == len(data) > 0
        assert {batch.features.shape[1:] for batch in batches} == {(3, 224, 224)}
    job.explain(), job.statistics(), job.stages()
"""


def test_a_loop_without_pytorch_goes_through_its_epochs_without_torch(tmp_path):
    assert ran(PLAIN, image_folder(tmp_path, per_class=3), "") == []


def test_a_loop_without_pytorch_needs_none_to_be_installed(tmp_path):
    ran("sys.modules['torch'] = None" + PLAIN, image_folder(tmp_path, per_class=3), "")


def test_a_loop_over_s3_goes_through_its_epochs_without_torch(s3, tmp_path):
    s3.put_folder(image_folder(tmp_path, per_class=3), "light")
    assert ran(PLAIN, "s3://light", "", **s3.environment()) == []


def test_a_kept_epoch_comes_from_the_disk_without_torch(tmp_path):
    folder, kept = image_folder(tmp_path / "images", per_class=3), tmp_path / "kept"
    code = """
import frostline as fl
data, settings = fl.Dataset(sys.argv[1]), fl.LoaderSettings(cache_folder=sys.argv[2])
for known in 0, len(data):
    with fl.offload(None, data, settings=settings) as job:
        assert sum(len(batch.ids) for batch in job.arrays(4)) == len(data)
        assert job.statistics().from_cache == known
"""
    assert ran(code, folder, kept) == []


def test_an_io_service_reads_and_decodes_for_its_jobs_without_torch(tmp_path):
    folder = image_folder(tmp_path, per_class=3)
    upstream = Upstream(roots=(folder.as_uri(),), node=NodeSettings(memory_bytes=256 << 20))
    with start_io(upstream, IoSettings(memory_bytes=64 << 20)) as service:
        assert ran(PLAIN, folder, service.url) == []
        assert not _has_torch(service.pid)


def test_an_io_service_starts_a_node_when_a_job_brings_a_network(tmp_path):
    images = make_images(tmp_path / "images", 8)
    digest, artifact = artifact_of(small_network())
    upstream = Upstream(roots=(images.as_uri(),), node=NodeSettings(memory_bytes=256 << 20))
    with start_io(upstream, IoSettings(memory_bytes=64 << 20)) as service:
        transport = service.transport()
        transport.put_prefix(digest, artifact)
        transport.close()
        assert _has_torch(service.pid)


def _has_torch(pid):
    """Whether a process has torch's libraries mapped."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_plain_loops_and_trainings_of_pytorch_import_nothing_that_plots_or_compiles(tmp_path):
    code = f"""
import frostline as fl, frostline.loaders
assert "torch" not in sys.modules
from frostline.loaders import Batch, Loader, WorkerLoader
assert frostline.loaders.FeatureNoise is fl.FeatureNoise
data = fl.Dataset(sys.argv[1])
with fl.offload(None, data) as job:
    assert sum(len(batch.ids) for batch in job.loader(4)) == len(data) > 0
import torch
import frostline.training.run
from frostline.training.loop import Optimizer
from frostline.wire.recipes import Recipe
weight = torch.ones(2, requires_grad=True)
for name in ("adam", "adamw", "sgd"):
    optimizer = Optimizer(Recipe(optimizer=name), [weight])
    weight.sum().backward()
    optimizer.step(1.0)
heavy = [name for name in ("torch._dynamo", *{HEAVY}) if name in sys.modules]
assert heavy == ["torch"], heavy
assert fl.freeze is frostline.models.freeze is frostline.models.freeze
"""
    assert "torch" in ran(code, image_folder(tmp_path, per_class=2))


def test_a_network_is_cut_and_trained_without_the_compiler_of_pytorch(tmp_path):
    code = f"""
import torch
import frostline as fl
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 9))
with fl.offload(fl.freeze(model, "0", input_shape=(3, 224, 224)), sys.argv[1]) as job:
    for x, y in job.loader(4):
        torch.nn.functional.cross_entropy(job.head(x), y).backward()
assert model[3].weight.grad is not None
heavy = [name for name in ("torch._dynamo", *{HEAVY}) if name in sys.modules]
assert heavy == ["torch"], heavy
"""
    assert "torch" in ran(code, image_folder(tmp_path, per_class=2))


def test_arrow_asks_for_pandas_once_in_the_commands_own_process():
    code = """
from frostline.cli import main
try:
    main(["--version"])
except SystemExit:
    pass
import pyarrow as pa
table = pa.table({"a": ["x"]})
assert "pandas" not in sys.modules
assert table.to_pandas().shape == (1, 1)
assert pa.array(sys.modules["pandas"].Series(["a", None])).null_count == 1
"""
    assert "torch" not in ran(code)
