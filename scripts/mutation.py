"""Measures how many small changes of what decides its tests notice: a fixed random sample of mutants each.

Needs cosmic-ray beside the packages of the tests: `make mutation` fetches it into `build/mutation`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome

HERE = Path(__file__).parent
PACKAGES = {
    "ordering": (("ordering/*.py",), ("tests/ordering",)),
    "planning": (("planning/*.py",), ("tests/planning",)),
    "batching": (("batching.py",), ("tests/batching",)),
    "tuning": (("tuning.py",), ("tests/tuning",)),
    "prefetch": (("prefetch/requests.py", "prefetch/window.py", "prefetch/owned_requests.py"), ("tests/prefetch",)),
    "codecs": (("wire/codecs.py", "wire/packing.py"), ("tests/wire",)),
    "core": (
        ("core/nouns.py", "core/graph.py", "core/units.py", "core/request_timing.py"),
        ("tests/core", "tests/prefetch", "tests/wire"),
    ),
}
"""What decides: its modules, and the folders of tests that are theirs; the nouns of core have most of theirs in two."""

UNTRIED = ("core/ReplaceBinaryOperator_BitOr_",)
"""Operators that change annotations more than code: `int | None` cannot be multiplied, so all its mutants would die."""


def main():
    options = _options()
    os.nice(19)
    tree = _copy(options.tree.resolve(), options.work.resolve())
    os.chdir(tree)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{HERE.resolve()}",
    }
    report = {"tree": options.name, "sampled": options.sample, "seed": options.seed, "packages": {}}
    for package in options.package or PACKAGES:
        report["packages"][package] = _score(package, options)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(package, {key: value for key, value in report["packages"][package].items() if key != "survivors"})


def _options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(), help="the checkout to measure (default: this folder)")
    parser.add_argument("--name", default="now", help="what the report calls it")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only this one; may come again")
    parser.add_argument("--sample", type=int, default=40, help="mutants tried of each package (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (default: 0)")
    parser.add_argument("--work", type=Path, default=Path("build/mutation/tree"), help="where the copy is made")
    parser.add_argument("--out", type=Path, required=True, help="file for the report")
    options = parser.parse_args()
    options.out = options.out.resolve()
    return options


def _copy(tree, work):
    """A copy of the tracked files, whose compiled files notice any change, also two within one second."""
    subprocess.run(["git", "-C", tree, "checkout-index", "--all", "--force", f"--prefix={work}/"], check=True)
    compiler = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src", "tests"]
    subprocess.run(compiler, check=True, cwd=work)
    return work


def _score(package, options):
    everything = _mutants(package)
    names = sorted(everything, key=lambda name: sha256(f"{options.seed} {name}".encode()).digest())
    command = _command(package)
    limit_s = _limit(command)
    survivors, outcomes = [], dict.fromkeys(TestOutcome, 0)
    for mutant in map(everything.get, names[: options.sample]):
        result = mutate_and_test(mutant.mutations, command, limit_s)
        outcomes[result.test_outcome] += 1
        if result.test_outcome is TestOutcome.SURVIVED:
            survivors.append(_described(mutant, result))
            print(package, "survived:", survivors[-1]["change"], flush=True)
    tried = outcomes[TestOutcome.KILLED] + outcomes[TestOutcome.SURVIVED]
    return {
        "mutants": len(everything),
        "tried": tried,
        "killed": outcomes[TestOutcome.KILLED],
        "killed_percent": round(100 * outcomes[TestOutcome.KILLED] / tried, 1),
        "survivors": survivors,
    }


def _mutants(package):
    """The mutants by name, which stays when a function moves to another file: two trees draw the same ones."""
    patterns, _ = PACKAGES[package]
    modules = sorted({path for pattern in patterns for path in Path("src/frostline").glob(pattern)})
    with use_db(":memory:", WorkDB.Mode.create) as database:
        init(modules, database, {})
        items = [item for item in database.work_items if not item.mutations[0].operator_name.startswith(UNTRIED)]
    counts, named = Counter(), {}
    for item in sorted(items, key=lambda item: _place(item.mutations[0])):
        kind = (item.mutations[0].definition_name, item.mutations[0].operator_name)
        named[*kind, counts[kind]] = item
        counts[kind] += 1
    return named


def _place(mutation):
    return str(mutation.module_path), mutation.occurrence


def _command(package):
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "mutation_profile", "--hypothesis-seed=0")
    return shlex.join([sys.executable, "-m", "pytest", *options, *PACKAGES[package][1]])


def _limit(command):
    """Three times what the tests need of the code as it is: a mutant that runs on for ever is noticed too."""
    began = time.monotonic()
    subprocess.run(shlex.split(command), check=True)
    return 3 * (time.monotonic() - began) + 30


def _described(mutant, result):
    mutation = mutant.mutations[0]
    lines = [line for line in result.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return {
        "module": str(mutation.module_path),
        "line": mutation.start_pos[0],
        "operator": mutation.operator_name,
        "change": " -> ".join(line[1:].strip() for line in lines),
    }


if __name__ == "__main__":
    main()
