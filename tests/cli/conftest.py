"""What the tests of commands share: a folder of images, and the options that name the shared node."""

import pytest

from support.images import image_folder


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """24 images in three classes; read it, don't write to it."""
    return image_folder(tmp_path_factory.mktemp("images"), per_class=8)


@pytest.fixture(scope="session")
def near(shared_node):
    """Options that name a node for whatever folder a test makes."""
    return "--near", shared_node.url
