"""A plugin for pytest: Hypothesis looks for a mutant with the usual examples, and does not make what it found small."""

import pytest
from hypothesis import Phase, settings


@pytest.hookimpl(trylast=True)
def pytest_configure():
    settings.register_profile(
        "mutation", settings.get_profile("here"), phases=(Phase.explicit, Phase.generate), database=None
    )
    settings.load_profile("mutation")
