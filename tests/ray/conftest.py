"""What tests under Ray share: a folder of images, and a Ray of this machine with a node that serves it."""

import pytest

from support.images import image_folder
from support.ray_here import NODE, ray_here


@pytest.fixture(scope="module", autouse=True)
def _no_forks(plain_starts):
    """Ray's own threads and channels do not live through a fork."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=12)


@pytest.fixture(scope="module")
def here(folder):
    with ray_here() as here:
        here.cluster("up", "--data-root", folder, *NODE)
        yield here
        assert here.cluster("down")["ray"], "what Ray keeps for itself holds nobody up"
