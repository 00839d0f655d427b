"""What others say of the folder: hadolint, yamllint and Kubernetes' own schemas, which `make test` brings."""

import json
import os
import subprocess
import sys

import pytest

from support.chart import CHART, rendered, values_of
from support.deployed import DEPLOY, ROOT

TOOLS = ROOT / "build" / "deploy-tools"
CASES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
RULES = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, truthy: disable}}"
CHECK = """
import json, sys, yaml
import kubernetes_validate
version, *texts = json.load(sys.stdin)
for value in filter(None, map(yaml.safe_load, texts)):
    kubernetes_validate.validate(value, version, strict=True)
"""

pytestmark = pytest.mark.skipif(
    not (TOOLS / "installed.txt").exists(), reason="the linters are not here: run scripts/deploy_tools.sh"
)


def ran(*command, said=None):
    done = subprocess.run(
        list(map(str, command)),
        input=said,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("image", ["container", "kuberay"])
def test_hadolint_finds_nothing_to_say(image):
    ran(TOOLS / "bin" / "hadolint", DEPLOY / image / "Dockerfile")


def test_yamllint_finds_nothing_to_say():
    files = [path for path in DEPLOY.rglob("*.yaml") if path.parent.name != "templates"]
    assert len(files) > 5
    ran(sys.executable, "-m", "yamllint", "--strict", "-d", RULES, *files)


@pytest.mark.parametrize("version", ["1.27", "1.30", "1.34", "1.37"])
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_what_the_chart_makes(case, version):
    texts = [text for name, text in rendered(values_of(case)).items() if name.endswith(".yaml")]
    ran(sys.executable, "-c", CHECK, said=json.dumps([version, *texts]))
