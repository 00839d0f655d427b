"""Which of these tests are for this process: those of its framework; without one, the test that runs them all."""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from support.frameworks import FILES
from support.images import image_folder, tiny_preprocess

_FRAMEWORK = os.environ.get("FROSTLINE_FRAMEWORK", "")
_HERE = FILES.get(_FRAMEWORK, ("test_frameworks.py",))
# Before a test imports PyTorch, which a process for another framework does without.
_BROUGHT = bool(_FRAMEWORK) and import_module(f"frostline.loaders.adapters.{_FRAMEWORK}") and "torch" in sys.modules
collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in _HERE]


@pytest.fixture(scope="session")
def torch_was_brought():
    """Whether the loader of this framework has imported PyTorch."""
    return _BROUGHT


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """45 images in three classes."""
    return image_folder(tmp_path_factory.mktemp("images"), per_class=15)


@pytest.fixture(scope="session")
def job(folder):
    """A job without a model over these, with a node of its own."""
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=3, cache_bytes=0)
    node = NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings, node=node) as job:
        yield job
