"""Frostline as a plain loader beside eight others, over links of several lengths: rate, processor, memory, first batch.

    scripts/compared_loaders.sh              # once: the other loaders, into build/compared-loaders
    scripts/frameworks.sh                    # once: TensorFlow, into build/frameworks
    python benchmarks/compare.py --data DIR [--what photographs,objects] [--round-trips 0,20,75,150] [--out FILE]

A SeaweedFS holds the same samples in the format that each loader takes, at one end of a wide-area link
(`parts/wide_link.py`), each side on a core of its own. Each loader is a process of its own, by turns, tuned as its
documentation says (`parts/compare_loaders.py`): a warm-up on other samples, then one pass, cut after --seconds.
Photographs are decoded by the same function everywhere; objects of 100 kB are not. Needs root.

- samples/s: from three seconds on, or from the first batch of every worker on, to the end; and of the whole pass;
- CPU: of all processes of the loader, while it is steady;
- memory: the most that they had at once, each shared page divided by those that share it;
- stolen: what the host of a virtual machine took of the processors meanwhile: runs that lost much say little;
- first and second batch, and samples after so many seconds: from the call on, with listing, connecting and starting
  workers.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path

from harness import ROOT, Inside, Skipped, answer_questions, doing, modules, run, serve_node, wide_links
from parts.compare_formats import BUCKET, FORMS, PARTS, WARM, make_formats
from parts.compare_table import draw, table
from parts.wide_link import WideLink

from support.seaweed import find_weed, seaweed

OTHERS = Path(os.environ.get("COMPARED_LOADERS", ROOT / "build" / "compared-loaders"))
FRAMEWORKS = Path(os.environ.get("FRAMEWORKS", ROOT / "build" / "frameworks"))
# The same each time: a store that is started again in its folder keeps its own addresses.
PORTS = list(range(18080, 18088))
STEADY_AFTER_S = 3.0
BEGINNING_S = (2, 4)
WATCHED_EVERY_S = 0.25
# Processes of a loader that has some. PyTorch asks for no more than cores where they compute; where each waits for a
# store, one read at a time, a longer round trip takes more of them.
WORKERS = {
    "DataLoader, s3torchconnector": lambda ms: 4 if ms == 0 else 16,
    "LitData": lambda ms: 4,
    "MosaicML Streaming": lambda ms: 4,
    "DataLoader, local files": lambda ms: 2,
    "WebDataset": lambda ms: 4 if ms < 75 else 8,
    "Ray Data": lambda ms: 2 if ms == 0 else 4,
}


QUICK = {
    "what": "photographs",
    "round_trips": "5",
    "loaders": "Frostline",
    "formats": "files",
    "samples": 96,
    "warm": 16,
    "seconds": 0.5,
    "side": 32,
    "workers": 1,
}


def options(parser):
    parser.add_argument("--folder", help="keeps the formats and the store; without it one that is removed at the end")
    parser.add_argument("--what", default="photographs,objects")
    parser.add_argument("--round-trips", default="0,20,75,150", help="ms")
    parser.add_argument("--loaders", help="names, with ; between them; all by default")
    parser.add_argument("--formats", default=",".join(FORMS), help="that are made for the loaders")
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--loss", type=float, default=0)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--warm", type=int, default=WARM, help="samples of the warm-up")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--workers", type=int, help="processes of loaders that have some, for all of them")


def servers_and_loaders(wanted):
    if find_weed() is None:
        raise Skipped("SeaweedFS, which holds the data, is not installed")
    if not wanted.loaders and not OTHERS.is_dir():
        raise Skipped("the other loaders are not here: scripts/compared_loaders.sh installs them")


def measure(wanted):
    os.sched_setaffinity(0, {0})  # the link's own work too is on the store's core
    find_packages()
    with nullcontext(wanted.folder) if wanted.folder else tempfile.TemporaryDirectory() as folder:
        wanted.folder, runs = folder, []
        subprocess.run(
            [sys.executable, __file__, "--inside", "formats", json.dumps(vars(wanted), default=str)], check=True
        )
        for number in range(wanted.rounds):
            for round_trip_ms in map(float, wanted.round_trips.split(",")):
                for found in over_one_link(wanted, round_trip_ms, number):
                    runs.append(found)
                    yield {"runs": runs}


def find_packages():
    """For the programs that are started from here; what they were to find before comes last."""
    path = [ROOT / "src", ROOT / "tests", ROOT / "benchmarks", OTHERS, FRAMEWORKS, os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, path)))


def over_one_link(wanted, round_trip_ms, number):
    """One run of each loader, in another order each time."""
    from parts.compare_loaders import LOADERS

    loaders = deque(wanted.loaders.split(";") if wanted.loaders else LOADERS)
    loaders.rotate(-number)
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit, loss=wanted.loss) as link,
        Inside(link.store, 0, "store", wanted, address=link.address) as store,
    ):
        environment = store.answer()
        with Inside(link.store, 0, "node", wanted, environment=environment, address=link.address) as node:
            near = node.answer()["url"]
            for what, loader in product(wanted.what.split(","), loaders):
                cell = {"what": what, "loader": loader, "round_trip_ms": round_trip_ms, "mbit": wanted.mbit}
                if (found := one_run(wanted, link, cell, environment, near, number)) is not None:
                    yield found


def one_run(wanted, link, cell, environment, near, number):
    """A loader in a process of its own; None where it failed."""
    import psutil

    loader = cell["loader"]
    workers = wanted.workers or WORKERS.get(loader, lambda _: 1)(cell["round_trip_ms"])
    with tempfile.TemporaryDirectory(dir=wanted.folder) as scratch:
        task = {"what": cell["what"], "side": wanted.side, "workers": workers, "node": near, "seed": number}
        task |= {"local": str(Path(wanted.folder) / "formats")}
        warm = {**task, "part": "warm", "samples": wanted.warm, "scratch": f"{scratch}/w"}
        whole = {**task, "part": "all", "samples": wanted.samples, "scratch": f"{scratch}/a"}
        inside = Inside(link.trainer, 1, "loader", wanted, environment=environment, loader=loader)
        with inside as there, Watch(there.pid) as watch, suppress(SystemExit):
            there.ask(do="run", task=warm, seconds=60)
            watch.max_bytes, before = 0, psutil.cpu_times()
            found = there.ask(do="run", task=whole, seconds=wanted.seconds)
            found |= {**cell, "workers": workers, "memory_bytes": watch.max_bytes, "load": os.getloadavg()[0]}
            doing(f"{cell['round_trip_ms']:4.0f} ms {cell['what']:11} {loader:33} {found['samples_per_s']:7.1f}/s")
            return found | {"stolen": stolen(before, psutil.cpu_times())}
    doing(f"{loader} failed")
    return None


def stolen(before, after):
    """The share of all processors' time that the host gave to others."""
    passed = [late - early for early, late in zip(before, after, strict=True)]
    return (after.steal - before.steal) / max(sum(passed), 1e-9)


class Watch:
    """The most memory that a process and its children have at once. A context manager."""

    def __init__(self, pid):
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.max_bytes = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _watch(self):
        while not self._over.wait(WATCHED_EVERY_S):
            self.max_bytes = max(self.max_bytes, sum(map(_pss, tree(self._pid))))


def _pss(process):
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def tree(pid):
    """A process and all that it started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_s():
    """Processor time of this process and its children, those that ended too."""
    import psutil

    spent = 0.0
    for process in tree(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            spent += sum(process.cpu_times()[:4])
    return spent


def formats_inside(wanted):
    counts = dict.fromkeys(wanted.what.split(","), (wanted.warm, wanted.samples))
    make_formats(Path(wanted.folder) / "formats", wanted.data, counts, wanted.formats.split(","))


def store_inside(wanted):
    """A SeaweedFS with all formats, and the manifests, which are made once, as others' chunks are with their index."""
    import frostline as fl

    folder = Path(wanted.folder)
    (folder / "weed").mkdir(exist_ok=True)
    with seaweed(folder / "weed", host=wanted.address, ports=PORTS) as server:
        os.environ |= server.environment()
        if not (folder / "filled").exists():
            server.put_folder(folder / "formats", BUCKET)
            (folder / "filled").touch()
        ours = [format for format in wanted.formats.split(",") if format in ("files", "shards")]
        for what, part, format in product(wanted.what.split(","), PARTS, ours):
            assert len(fl.Dataset(f"s3://{BUCKET}/{what}/{part}/{format}"))
        print(json.dumps(server.environment() | {"S3_ENDPOINT_URL": f"http://{server.s3}"}), flush=True)
        sys.stdin.read()


def node_inside(wanted):
    from frostline.core.config import NodeSettings

    wanted.data = f"s3://{BUCKET}"
    serve_node(wanted, NodeSettings(allow_anonymous=True))


def loader_inside(wanted):
    from parts.compare_loaders import LOADERS, Task

    def run(task, seconds):
        return measured(LOADERS[wanted.loader](Task(**task)), task, seconds)

    # What loaders print is no answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        sys.stdout = answers
        answer_questions({"run": run})
    atexit._run_exitfuncs()  # noqa: SLF001
    os._exit(0)  # some wait at their end for what nobody wants any more


def measured(batches, task, seconds):
    """Take batches until the end or the time is over; of workers each has given two then."""
    from parts.compare_loaders import BATCH

    minimum = BATCH * task["workers"]
    started, cpu_before = time.perf_counter(), cpu_s()
    done, came, steady = 0, [], None
    for samples, labels in batches:
        now = time.perf_counter() - started
        assert len(samples) == len(labels)
        done += len(labels)
        came.append((now, done))
        is_steady = now >= STEADY_AFTER_S and done >= minimum
        if steady is None and (is_steady or done >= task["samples"] / 2):
            steady = (now, done, cpu_s())
        if now >= seconds and done >= 2 * minimum:
            break
    cpu = cpu_s()
    batches.close()
    steady = steady or (0.0, 0, cpu_before)
    rate = (done - steady[1]) / (now - steady[0]) if done > steady[1] else done / now
    return {
        "samples_per_s": rate,
        "whole_samples_per_s": done / now,
        "first_batch_s": came[0][0],
        "second_batch_s": came[min(1, len(came) - 1)][0],
        "samples_after": {f"{s}": max((count for at, count in came if at <= s), default=0) for s in BEGINNING_S},
        "cpu_s_per_sample": (cpu - steady[2]) / max(1, done - steady[1]),
        "whole_cpu_s_per_sample": (cpu - cpu_before) / done,
        "samples": done,
        "seconds": now,
    }


INSIDE = {"formats": formats_inside, "store": store_inside, "node": node_inside, "loader": loader_inside}

if __name__ == "__main__":
    needs = (wide_links, modules("psutil"), servers_and_loaders)
    shown = {"table": table, "draw": draw}
    run(__doc__, measure, quick=QUICK, options=options, inside=INSIDE, needs=needs, pictures=16, **shown)
