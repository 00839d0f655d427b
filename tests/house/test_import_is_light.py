"""Importing Frostline costs little."""

import subprocess
import sys


def test_torch_is_not_imported_until_it_is_needed():
    code = "import sys, frostline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
