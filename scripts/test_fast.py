"""Runs the tests of some folders beside the types and the import contracts, within a minute, and says what each took.

python scripts/test_fast.py FOLDER...    # folders of tests/, as `make test-fast FOLDER=node` has it
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
TESTS_S = 45
"""When the last test may begin: a minute less what starts, ends and is checked."""
FEW_S = 10
"""Tests that take less in one process are not spread over several, which take seconds to start."""


def main(names):
    """Run everything; returns the exit status."""
    there = sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py")))
    if not names or not set(names) <= set(there):
        print(f"make test-fast FOLDER=... takes folders of tests/: {' '.join(there)}", file=sys.stderr)
        return 2
    checks = {
        "types": [BIN / "mypy"],
        "contracts": [BIN / "lint-imports"],
    }
    with ThreadPoolExecutor(len(checks)) as pool:
        running = {name: pool.submit(ran, command, capture_output=True) for name, command in checks.items()}
        folders = [f"tests/{name}" for name in names]
        options = spread(names, durations(), os.environ.get("WORKERS", "0"))
        tests = ran([BIN / "python", "-m", "pytest", "--quiet", f"--within={TESTS_S}", *options, *folders])
        done = {"tests": tests} | {name: future.result() for name, future in running.items()}
    for process, _ in done.values():
        if process.returncode and process.stdout:
            print(f"\n{process.stdout}{process.stderr}")
    said = (
        f"{name} {'FAILED' if did.returncode else 'passed'} ({took_s:.0f} s)" for name, (did, took_s) in done.items()
    )
    print("\n" + ", ".join(said))
    return int(any(process.returncode for process, _ in done.values()))


def ran(command, **options):
    """The ended process of a command, and how many seconds it took."""
    began = time.monotonic()
    return subprocess.run(list(map(str, command)), cwd=ROOT, text=True, **options), time.monotonic() - began


def durations():
    """What each test took when it last ran here, in seconds."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.within import kept

    return kept()


def spread(names, known, workers):
    """Options for as many processes as the tests of folders are worth, by what they took before."""
    folders = tuple(f"tests/{name}/" for name in names)
    took = [seconds for name, seconds in known.items() if name.startswith(folders)]
    if took and sum(took) < FEW_S:
        workers = "0"
    return ["--numprocesses", workers, "--dist", "loadfile", "--no-loadscope-reorder"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
