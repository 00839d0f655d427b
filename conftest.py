"""Runs the code in the docs as it stands there, makes nothing of how the run was started, and judges what skips."""

import gc
import os
import re
import tempfile
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from support.skips import counted, forbidden
from support.started import forget_how_it_was_started
from support.within import Within

# Before anything reads the environment or starts a process; workers of xdist come here too.
forget_how_it_was_started()

# Before torch is loaded. Tests run beside one another and beside nodes of their own: a thread of OpenMP that has no
# work would otherwise spin on a core that another process has work for (on two cores one test took 72 s in place of 9).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What is imported and collected stays to the end: to look through it took a fourth of the time of collecting, and nearly
# a second each time that a test made enough objects.
gc.disable()

# Sections whose code runs where that framework is, as tests/frameworks has it; all else runs everywhere.
SECTIONS = {"PyTorch": "", "TensorFlow and Keras": "tensorflow", "JAX": "jax", "NVIDIA DALI": "dali"}
CLASSES = {"circles": "ellipse", "squares": "rectangle", "lines": "line"}


def make_photos(folder, each=12):
    """Class folders of small JPEGs that differ enough to be learned from in a moment."""
    from PIL import Image, ImageDraw

    for name, shape in CLASSES.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            image = Image.new("RGB", (256, 256), (20 * number % 256, 120, 200))
            box = (20 + 5 * number, 40, 150 + 5 * number, 200)
            getattr(ImageDraw.Draw(image), shape)(box, fill="white", **({"width": 9} if shape == "line" else {}))
            image.save(folder / name / f"{number}.jpg")


def enter(namespace):
    namespace["_left"], namespace["_folder"] = Path.cwd(), tempfile.TemporaryDirectory()
    os.chdir(namespace["_folder"].name)
    namespace["_cache"] = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = f"{namespace['_folder'].name}/cache"
    make_photos(Path("photos"))


def leave(namespace):
    os.chdir(namespace["_left"])
    if namespace["_cache"] is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = namespace["_cache"]
    namespace["_folder"].cleanup()


def code_for_here(document):
    """The code blocks whose section needs no other framework than the one that is here."""
    for region in PythonCodeBlockParser()(document):
        headings = re.findall(r"^## (.+)$", document.text[: region.start], re.MULTILINE)
        wanted = SECTIONS.get(headings[-1]) if headings else None
        if wanted in (None, os.environ.get("FROSTLINE_FRAMEWORK", "")):
            yield region


pytest_collect_file = Sybil(
    parsers=[code_for_here, SkipParser()],
    patterns=["README.md", "docs/quickstart.md", "docs/splits.md", "docs/order.md", "docs/frameworks.md"],
    setup=enter,
    teardown=leave,
).pytest()


def pytest_addoption(parser):
    parser.addoption("--within", type=float, metavar="SECONDS", help="run the shortest tests, as many as fit")


def pytest_configure(config):
    config.pluginmanager.register(Within(config))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def judged(report):
    """A report of a skipped test or file as a failure, where its reason is none for which it may skip."""
    if report.skipped and not hasattr(report, "wasxfail"):
        why_not = forbidden(reason_of(report))
        if why_not is not None:
            report.outcome, report.longrepr = "failed", why_not
    return report


def reason_of(report):
    """The reason that a skipped test or file gave."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return judged((yield))


def pytest_terminal_summary(terminalreporter):
    """Say how many tests skipped for each reason, and what makes them run."""
    for line in counted(map(reason_of, terminalreporter.stats.get("skipped", ()))):
        terminalreporter.write_line(line)
