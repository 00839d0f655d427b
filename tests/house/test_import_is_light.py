"""Importing Frostline costs little."""

import subprocess
import sys

from support.images import image_folder


def test_torch_is_not_imported_until_it_is_needed():
    code = "import sys, frostline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_plain_loader_imports_nothing_that_traces_networks(tmp_path):
    code = """
import sys
import frostline as fl
data = fl.Dataset(sys.argv[1])
with fl.offload(None, data) as job:
    assert sum(len(batch.ids) for batch in job.loader(4)) == len(data) > 0
sys.exit(any(name in sys.modules for name in ("frostline.models.trace", "sympy")))
"""
    folder = image_folder(tmp_path, per_class=2)
    assert subprocess.run([sys.executable, "-c", code, folder]).returncode == 0
