"""Values for KubeRay: they agree with the locked Ray, with the image beside them, and with the page that names them."""

import re

import yaml

from frostline.core.config import NodeSettings
from frostline.ray.scaling import ClusterSettings
from support.deployed import DEPLOY, ROOT

HERE = DEPLOY / "kuberay"
VALUES = yaml.safe_load((HERE / "values.yaml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def test_the_image_has_the_ray_that_the_tests_run():
    locked = re.search(r"^ray==(\S+)", (ROOT / "requirements" / "test.txt").read_text(), re.MULTILINE)[1]
    image = re.search(r"^ARG RAY=rayproject/ray:(\S+)-py\d+$", (HERE / "Dockerfile").read_text(), re.MULTILINE)[1]
    assert image == locked


def test_nodes_are_placed_on_the_workers_by_the_label_that_the_page_names():
    label = re.search(r"cluster up .*--on-label (\S+)", PAGE)[1]
    assert VALUES["worker"]["rayStartParams"]["labels"] == label
    settings = ClusterSettings(roots=("s3://photos",), node=NodeSettings(), label=label)
    assert settings.selector == dict([label.split("=")])
    assert "labels" not in VALUES["head"]["rayStartParams"], "the head has none"


def test_start_parameters_are_texts_as_the_resource_has_them():
    for group in ("head", "worker"):
        assert all(isinstance(value, str) for value in VALUES[group]["rayStartParams"].values())


def test_no_key_is_written_into_the_values_and_the_secret_is_that_of_the_page():
    names = {item["name"] for item in VALUES["worker"]["containerEnv"]}
    assert not any("SECRET" in name or "KEY" in name or "TOKEN" in name for name in names)
    [source] = VALUES["worker"]["envFrom"]
    assert f"create secret generic {source['secretRef']['name']} " in PAGE
