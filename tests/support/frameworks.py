"""The frameworks beside PyTorch that scripts/frameworks.sh installs, and how programs are run with them."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ("FILES", "ROOT", "start", "why_no_frameworks")

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "frameworks"
FILES = {
    "dali": ("test_dali.py",),
    "jax": ("test_jax.py",),
    "tensorflow": ("test_tensorflow.py", "test_together.py"),
}
"""The tests of each, in ``tests/frameworks``."""


def why_no_frameworks():
    """Why their tests must skip; None where they need not."""
    if (HOME / "installed.txt").is_file():
        return None
    return "TensorFlow, JAX and DALI are not here: run scripts/frameworks.sh, which fetches them"


def start(framework, *argv, devices=4):
    """Start Python with a framework on its path, and so many devices of JAX."""
    path = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")]), str(HOME)]
    environment = {
        **os.environ,
        "FROSTLINE_FRAMEWORK": framework,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path),
        "FROSTLINE_TESTS_PLAIN_STARTS": "1",  # JAX warns of a fork
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
