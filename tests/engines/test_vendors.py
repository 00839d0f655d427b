"""Packages that report to their makers are kept from it, and have a version whatever brought them."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from frostline.core.errors import SettingError
from frostline.engines.machine import free_device_bytes, version_of, versions

pytestmark = pytest.mark.usefixtures("plain_starts")


def test_openvino_and_nncf_find_nothing_to_call_home_with():
    code = (
        "import sys\n"
        "from frostline.engines.machine import import_now, is_installed\n"
        "if is_installed('openvino') and is_installed('nncf'):\n"
        "    import_now('openvino'), import_now('nncf')\n"
        "sys.exit(any(name.startswith('openvino_telemetry') and module for name, module in sys.modules.items()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_finds_the_version_of_a_package_installed_by_another_distribution(tmp_path):
    (tmp_path / "instead").mkdir()
    (tmp_path / "instead" / "__init__.py").write_text("")
    about = tmp_path / "instead_gpu-9.1+cu13.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: instead-gpu\nVersion: 9.1+cu13\n")
    (about / "top_level.txt").write_text("instead\n")
    code = "from frostline.engines import machine as v; print(v.versions('instead'), v.version_of('instead'))"
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["instead-instead-gpu-9.1.cu13", "instead-gpu-9.1+cu13"]


def test_finds_the_version_of_a_package_and_none_of_a_missing_one():
    assert version_of("numpy") == version("numpy")
    assert versions("numpy") == f"numpy-{version('numpy')}"
    assert version_of("no_such_package") is None


def test_a_device_that_is_not_there_is_named_with_what_is():
    with pytest.raises(
        SettingError, match=r"device cuda:99 cannot be used here \(.+\): write cpu, which is always there"
    ):
        free_device_bytes("cuda:99")
