"""The page on deployment names options, ports and commands that there are."""

import re
import shutil
import subprocess

import pytest

from frostline.cli.cluster import cluster
from frostline.cli.commands import verbs
from frostline.node.tenants import read_tenants
from support.deployed import DEPLOY, OPTIONS, ROOT, options_of

PAGE = (ROOT / "docs" / "deploy.md").read_text()
TEXTS = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
_OF_OTHERS = {
    "--build-arg", "--detach", "--display-name", "--file", "--from-file", "--from-literal", "--namespace", "--tag",
    "--uid", "--values", "--wait",
}  # fmt: skip
_OF_OTHER_VERBS = {"--client", "--revoke", "--data", "--model", "--out", "--until", "--near", "--format"}
_OF_CLUSTER = {"--on-label", "--min", "--max"}


def test_every_option_that_the_page_names_exists():
    named = set(options_of(PAGE))
    assert len(named & OPTIONS) > 10
    assert named - OPTIONS - _OF_OTHERS - _OF_OTHER_VERBS - _OF_CLUSTER == set()


@pytest.mark.parametrize("path", [path for path in TEXTS if path.suffix in (".md", ".yaml", ".service", ".example")])
def test_every_option_that_a_comment_or_command_names_is_the_nodes(path):
    named = set(options_of(path.read_text())) - _OF_OTHERS
    assert named - OPTIONS - {"--near"} == (_OF_CLUSTER if path.parent.name == "kuberay" else set())


def test_options_of_other_verbs_are_theirs():
    assert not _OF_OTHER_VERBS & OPTIONS
    known = {name for verb in verbs.commands.values() for option in verb.params for name in option.opts}
    assert known >= _OF_OTHER_VERBS
    assert {name for option in cluster.commands["up"].params for name in option.opts} >= _OF_CLUSTER


def test_what_the_page_says_lies_in_the_folder():
    for name in re.findall(r"`((?:container|compose|helm|kuberay|systemd|deploy)/[\w./-]+)`", PAGE):
        assert (DEPLOY / name).exists() or (ROOT / name).exists(), name


@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("bash")), reason="there is no openssl or bash here")
def test_the_commands_for_a_token_make_a_file_of_tenants(tmp_path):
    (commands,) = [block for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) if "tenants.toml\n" in block
                   and "printf" in block]  # fmt: skip
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, timeout=200)
    (tenant,) = read_tenants(tmp_path / "tenants.toml")
    assert tenant.name == "trainers"


def test_files_of_the_folder_say_nothing_of_other_registries():
    for path in TEXTS:
        assert not re.search(r"docker\.io|ghcr\.io|quay\.io|pypi\.org|index-url", path.read_text()), path
