"""The process that checks prefixes needs nothing of this machine that its limits forbid, and says when torch failed."""

import os
import subprocess
import sys
from pathlib import Path

# `dill` sets a folder for temporary files at its import, which hides that torch looks for one.
CHECK = """
import sys
sys.modules["dill"] = None
from pathlib import Path
from frostline.core.files import FileCache
from frostline.node.inspection import Inspector

{before}
kept = FileCache(Path({folder!r}), ".json")
kept.put("0" * 64, b"{{}}")
with Inspector(fork=True, kept=kept) as inspector:
    from frostline.engines.measure import GraphLimits
    from frostline.models.artifact import header_of
    import torch
    from support.hostile import X, after, artifact, node

    ones = {{"ref": "ones"}}
    norm = node("n", "aten.batch_norm.default", X, ones, ones, ones, ones, False, 0.1, 1e-5, False)
    body = artifact(after(norm), {{"ones": torch.ones(3)}})
    limits = GraphLimits(max_nodes=9, max_values=99, max_run_s=9, max_operation_s=9, operations_per_s=1e9)
    print(len(inspector.inspect(header_of(body), max_rows=8, max_check_s=60.0, limits=limits).memory))
"""
FAILING = """
from frostline.node import inspection_process
def fails(*_, **__):
    raise FileNotFoundError("No usable temporary directory found in ['/tmp']")
inspection_process.inspect_prefix = fails
"""


def checked(folder, before=""):
    """A check by a fork that is not warmed up, in a process in which nobody has named a folder for files."""
    hidden = {"TORCHINDUCTOR_CACHE_DIR", "TMPDIR"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    tests = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join((tests, environment.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", CHECK.format(folder=str(folder), before=before)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_a_forked_process_that_is_not_warmed_up_checks_what_makes_torch_import_its_compiler(tmp_path):
    said = checked(tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == "2"


def test_tells_an_error_of_torch_from_a_check_that_took_too_long(tmp_path):
    said = checked(tmp_path, FAILING)
    last = said.stderr.strip().splitlines()[-1]
    assert last.endswith("UnsafeArtifact: PyTorch failed on the prefix with FileNotFoundError: it is refused")
