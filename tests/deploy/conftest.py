"""Services are started as those that deploy them start them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_forks(plain_starts):
    """What a service manager starts is no fork of a process that has PyTorch."""
