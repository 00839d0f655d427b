"""Runs the tests of the loaders for other frameworks, each in a process of its own, and shows their counts."""

import pytest

from support.frameworks import FILES, ROOT, start, why_no_frameworks


@pytest.mark.timeout(400)
@pytest.mark.parametrize("framework", sorted(FILES))
def test_the_loader_of_a_framework_passes_its_tests_beside_it(framework, record_property):
    if (why := why_no_frameworks()) is not None:
        pytest.skip(why)
    tests = [ROOT / "tests" / "frameworks" / name for name in FILES[framework]]
    with start(framework, "-m", "pytest", "-p", "no:cacheprovider", *tests, "docs/frameworks.md") as process:
        try:
            said, _ = process.communicate()
        finally:
            process.kill()
    count = said.strip().splitlines()[-1].strip("= ")
    record_property("tests of a framework", f"{framework}: {count}")
    assert process.returncode == 0, said
    assert "passed" in count
