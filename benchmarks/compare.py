"""Frostline as a plain loader beside eight others, over links of several lengths: rate, processor, memory, first batch.

    scripts/compared_loaders.sh              # once: the other loaders, into build/compared-loaders
    scripts/frameworks.sh                    # once: TensorFlow, into build/frameworks
    python benchmarks/compare.py --data DIR [--what photographs,objects] [--round-trips 0,20,75,150] [--out FILE]

A SeaweedFS holds the same samples in the format that each loader takes, at one end of a wide-area link
(`wide_link.py`), each side on a core of its own. Each loader is a process of its own, by turns, tuned as its
documentation says (`compare_loaders.py`): a warm-up on other samples, then one pass, cut after --seconds. Photographs
are decoded by the same function everywhere; objects of 100 kB are not. Needs root. With --out FILE (without suffix) the
runs that FILE.json holds count too, so that a long comparison can be done in pieces; a table and a picture are made.

- samples/s: from three seconds on, or from the first batch of every worker on, to the end; and of the whole pass;
- CPU: of all processes of the loader, while it is steady;
- memory: the most that they had at once, each shared page divided by those that share it;
- stolen: what the host of a virtual machine took of the processors meanwhile. With --max-stolen SHARE runs that lost
  more are made again, up to three times, and that which lost least counts: over a link that a program of the same
  machine makes the others say little;
- first and second batch, and samples after so many seconds: from the call on, with listing, connecting and starting
  workers.
"""

import argparse
import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import product
from pathlib import Path

from compare_table import SETTINGS, draw, table
from links import STORE, TRAINER, Inside, answer_questions
from wide_link import STORE_ADDRESS, WideLink

ROOT = Path(__file__).parents[1]
OTHERS = Path(os.environ.get("COMPARED_LOADERS", ROOT / "build" / "compared-loaders"))
FRAMEWORKS = Path(os.environ.get("FRAMEWORKS", ROOT / "build" / "frameworks"))
# The same each time: a store that is started again in its folder keeps its own addresses.
PORTS = list(range(18080, 18088))
STEADY_AFTER_S = 3.0
BEGINNING_S = (2, 4)
TRIES = 3
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


def main():
    wanted = arguments()
    if wanted.inside:
        {"store": store_inside, "node": node_inside, "loader": loader_inside, "formats": formats_inside}[wanted.inside](
            wanted
        )
        return
    os.sched_setaffinity(0, {0})  # the link's own work too is on the store's core
    find_packages()
    runs = earlier(wanted)
    ask_self(wanted, "formats")
    for number in range(wanted.rounds):
        for round_trip_ms in wanted.round_trips:
            for found in over_one_link(wanted, round_trip_ms, number):
                runs.append(found)
                keep(wanted, runs)
    print(table(runs))


def find_packages():
    """For the programs that are started from here; what they were to find before comes last."""
    path = [ROOT / "src", ROOT / "tests", ROOT / "benchmarks", OTHERS, FRAMEWORKS, os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, path)))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folders of photographs, one a class")
    parser.add_argument(
        "--folder", default=str(Path(tempfile.gettempdir()) / "frostline-compare"), help="keeps formats"
    )
    parser.add_argument("--what", type=words, default=["photographs", "objects"])
    parser.add_argument("--round-trips", type=numbers, default=[0, 20, 75, 150], help="ms")
    parser.add_argument("--loaders", type=lambda text: text.split(";"), help="names, with a semicolon between them")
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--loss", type=float, default=0)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--workers", type=int, help="processes of loaders that have some, for all of them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-stolen", type=float, default=1.0, help="share of the processors, by the host")
    parser.add_argument("--out")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--loader", help=argparse.SUPPRESS)
    return parser.parse_args()


def words(text):
    return text.split(",")


def numbers(text):
    return [float(word) for word in text.split(",")]


def earlier(wanted):
    path = Path(f"{wanted.out}.json")
    return json.loads(path.read_text())["runs"] if wanted.out and path.exists() else []


def keep(wanted, runs):
    if wanted.out:
        Path(f"{wanted.out}.json").write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        Path(f"{wanted.out}.md").write_text(table(runs) + "\n" + SETTINGS)
        draw(runs, f"{wanted.out}.svg")


def options(wanted):
    return ["--data", wanted.data, "--folder", wanted.folder, "--samples", str(wanted.samples)]


def ask_self(wanted, inside):
    """Run this program for something else."""
    subprocess.run([sys.executable, __file__, "--inside", inside, *options(wanted)], check=True)


def over_one_link(wanted, round_trip_ms, number):
    """One run of each loader, in another order each time."""
    from compare_loaders import LOADERS

    loaders = deque(wanted.loaders or LOADERS)
    loaders.rotate(-number)
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit, loss=wanted.loss),
        Inside(STORE, 0, __file__, "--inside", "store", *options(wanted)) as store,
    ):
        environment = store.answer()
        with Inside(STORE, 0, __file__, "--inside", "node", *options(wanted), environment=environment) as node:
            near = node.answer()["url"]
            for what in wanted.what:
                for loader in loaders:
                    cell = {"what": what, "loader": loader, "round_trip_ms": round_trip_ms, "mbit": wanted.mbit}
                    yield from one_of_some(wanted, lambda cell=cell: one_run(wanted, cell, environment, near, number))


def one_of_some(wanted, run):
    """The run of which the host took least, of no more than TRIES; nothing where the first one failed."""
    found = []
    while len(found) < TRIES and (not found or found[-1]["stolen"] > wanted.max_stolen):
        if (one := run()) is None:
            break
        found.append(one)
    if found:
        yield min(found, key=lambda item: item["stolen"])


def one_run(wanted, cell, environment, near, number):
    import psutil
    from compare_formats import WARM
    from compare_loaders import Task

    loader = cell["loader"]
    workers = wanted.workers or WORKERS.get(loader, lambda _: 1)(cell["round_trip_ms"])
    with tempfile.TemporaryDirectory(dir=wanted.folder) as scratch:
        task = {"what": cell["what"], "side": wanted.side, "workers": workers, "node": near, "seed": number}
        task["local"] = str(Path(wanted.folder) / "formats")
        Task(**task, part="all", samples=wanted.samples, scratch=scratch)  # named here, made there
        inside = Inside(
            TRAINER, 1, __file__, "--inside", "loader", "--loader", loader, *options(wanted), environment=environment
        )
        with inside as there, Watch(there.pid) as watch, suppress(SystemExit):
            there.ask(do="run", task={**task, "part": "warm", "samples": WARM, "scratch": f"{scratch}/w"}, seconds=60)
            watch.max_bytes = 0
            whole = {**task, "part": "all", "samples": wanted.samples, "scratch": f"{scratch}/a"}
            before = psutil.cpu_times()
            found = there.ask(do="run", task=whole, seconds=wanted.seconds)
            found |= {**cell, "workers": workers, "memory_bytes": watch.max_bytes, "load": os.getloadavg()[0]}
            found["stolen"] = stolen(before, psutil.cpu_times())
            print(
                f"{cell['round_trip_ms']:4.0f} ms {cell['what']:11} {loader:33} {found['samples_per_s']:7.1f}/s "
                f"({found['whole_samples_per_s']:.1f})  {1e3 * found['cpu_s_per_sample']:6.2f} ms CPU  "
                f"{found['memory_bytes'] / 1e6:6.0f} MB  first {found['first_batch_s']:.2f} s  "
                f"{100 * found['stolen']:.0f} % stolen",
                flush=True,
            )
            return found
    print(f"{loader} failed", file=sys.stderr, flush=True)
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
    from compare_formats import make_formats

    counts = dict.fromkeys(("photographs", "objects"), wanted.samples)
    make_formats(Path(wanted.folder) / "formats", wanted.data, counts)


def store_inside(wanted):
    from compare_formats import BUCKET, PARTS

    from support.seaweed import seaweed

    folder = Path(wanted.folder)
    weed = folder / "weed"
    weed.mkdir(exist_ok=True)
    with seaweed(weed, host=STORE_ADDRESS, ports=PORTS) as server:
        os.environ |= server.environment()
        if not (folder / "filled").exists():
            server.put_folder(folder / "formats", BUCKET)
            (folder / "filled").touch()
        # The manifests are made once, beside the data, as others' chunks are with their index.
        import frostline as fl

        for what, part, format in product(("photographs", "objects"), PARTS, ("files", "shards")):
            assert len(fl.Dataset(f"s3://{BUCKET}/{what}/{part}/{format}"))
        print(json.dumps(server.environment() | {"S3_ENDPOINT_URL": f"http://{server.s3}"}), flush=True)
        sys.stdin.read()


def node_inside(wanted):
    from compare_formats import BUCKET

    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    with start_node((f"s3://{BUCKET}",), NodeSettings(allow_anonymous=True), host=STORE_ADDRESS) as node:
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


def loader_inside(wanted):
    from compare_loaders import LOADERS, Task

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
    from compare_loaders import BATCH

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


if __name__ == "__main__":
    main()
