"""Packages that report to their makers are kept from it."""

import subprocess
import sys


def test_openvino_and_nncf_find_nothing_to_call_home_with():
    code = (
        "import sys\n"
        "from frostline.engines.vendors import imported, is_installed\n"
        "if is_installed('openvino') and is_installed('nncf'):\n"
        "    imported('openvino'), imported('nncf')\n"
        "sys.exit(any(name.startswith('openvino_telemetry') and module for name, module in sys.modules.items()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
