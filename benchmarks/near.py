"""A whole fine-tuning job across a link, beside the two scripts that people would write instead.

    python benchmarks/near.py --data DIR [--mbit 5,20,100,1000] [--photographs N] [--rounds 3] [--out FILE]

Store and trainer have a network namespace and one core each, joined by a link that tc shapes. Whole processes are
timed, by turns, from the command to its end. A job is at its defaults, by which that of the demo network ends after as
many epochs as the scripts have; one with --weights or --crops is given their number:

- first job: ``frostline train --near`` on a node that has just been started, with empty caches on both sides;
- second job: the same command once more, with what both sides have kept; with --extra "--cache-size 0" it computes
  all features again;
- script here: fetch photographs over HTTP by 16 threads, extract features once with PyTorch, keep them, train a head;
- script there: extract on the store's machine, copy the features over the link, train a head;
- plan, where it is named: ``frostline plan --near`` on the same node, for the samples a second that the linear
  programme gives for the costs that it measures. Jobs are then traced, for those that they had from the tenth second.

A ratio is the seconds of the better script over ours. Needs root.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, ShapedLink, Skipped, doing, markdown, median, namespaces, run, spread, torchvision_path

WAYS = ("first job", "second job", "script here", "script there")
SCRIPTS = WAYS[2:]
PLAN = "plan"
STEADY_S = 10
SCRIPT = ROOT / "benchmarks" / "parts" / "extract_once.py"
FROSTLINE = Path(sys.executable).with_name("frostline")
QUICK = {"mbit": "100", "epochs": "2", "ways": "first job,script here"}
READY_S = 60
# One thread for a core, and memory that is kept: a script that is tuned as well as a script may be.
TUNED = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
SERVES = """
import functools, http.server, sys
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[2])
handler.func.log_message = lambda *_: None
http.server.ThreadingHTTPServer((sys.argv[1], 8000), handler).serve_forever()
"""
ASKS = """
import sys, time, urllib.request
until = time.monotonic() + float(sys.argv[2])
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=2)
        break
    except OSError:
        if time.monotonic() > until:
            raise
        time.sleep(0.2)
"""


def options(parser):
    parser.add_argument("--mbit", default="5,20,100,1000")
    parser.add_argument("--photographs", type=int, help="so many, drawn by the seed; all of them by default")
    parser.add_argument("--model", default="demo:efficientnet_lite0")
    parser.add_argument("--until", default="features")
    parser.add_argument("--weights", help="as of `frostline train`; random ones must travel")
    parser.add_argument("--epochs", default="16", help="epochs of the scripts")
    parser.add_argument("--extra", default="", help="more options of `frostline train`")
    parser.add_argument("--crops", action="store_true", help="random crops each epoch, which nobody extracts once")
    parser.add_argument("--ways", default=",".join(WAYS))


def measure(wanted):
    rows = []
    with tempfile.TemporaryDirectory() as folder, ShapedLink(1000) as link:
        data = chosen(wanted, Path(folder))
        for mbit in map(float, wanted.mbit.split(",")):
            link.rate(mbit)
            for number in range(wanted.rounds):
                with laid_out(link, data, Path(folder) / f"{mbit:g}-{number}") as world:
                    for way in ways_of(wanted):
                        doing(f"{way}, {mbit:g} Mbit/s, round {number + 1}")
                        rows.append({"mbit": mbit, "round": number, "way": way, **RUNS[way](world, wanted)})
                        yield {"photographs": len(world.names), "rows": rows}


def ways_of(wanted):
    """The ways that are timed: features of random crops are not extracted once beside the store."""
    return [way for way in wanted.ways.split(",") if not (wanted.crops and way == "script there")]


def chosen(wanted, folder):
    """The photographs as a folder of their own, with names of their classes."""
    paths = sorted(path for path in Path(wanted.data).glob("*/*") if path.is_file())
    if wanted.photographs is not None:
        import numpy as np

        drawn = np.random.default_rng(wanted.seed).permutation(len(paths))[: wanted.photographs]
        paths = [paths[place] for place in sorted(drawn)]
    for path in paths:
        place = folder / "data" / path.parent.name / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return folder / "data"


class World:
    """One round: the photographs on a web server beside the store, and a folder for what it leaves."""

    def __init__(self, link, data, folder):
        self.link, self.data, self.folder = link, data, folder
        self.names = [f"{path.parent.name}/{path.name}" for path in sorted(data.glob("*/*"))]
        self.listed = folder / "names.json"
        self.listed.write_text(json.dumps(self.names))
        self.web = f"http://{link.address}:8000"

    def start(self, side, *words, **options):
        """A program on the store's core, or on the trainer's."""
        namespace, core = (self.link.store, "0") if side == "store" else (self.link.trainer, "1")
        return subprocess.Popen(["ip", "netns", "exec", namespace, "taskset", "-c", core, *map(str, words)], **options)

    def script(self, side, *words):
        """What an extraction script prints, and its seconds."""
        began, environment = time.perf_counter(), {**os.environ, **TUNED, "PYTHONPATH": torchvision_path()}
        done = self.start(side, sys.executable, SCRIPT, *words, env=environment, stdout=subprocess.PIPE, text=True)
        said = done.communicate()[0]
        if done.returncode:
            raise SystemExit(f"the script failed: {said}")
        return said.strip().rpartition("\n")[2], time.perf_counter() - began


@contextlib.contextmanager
def laid_out(link, data, folder):
    """A round's web server and node; both caches are empty."""
    folder.mkdir()
    world = World(link, data, folder)
    web = world.start("store", sys.executable, "-c", SERVES, link.address, data, stderr=subprocess.DEVNULL)
    words = ["serve", "--listen", f"{link.address}:7070", "--data-root", data, "--allow-anonymous"]
    with (folder / "node.log").open("w") as log:
        node = world.start("store", FROSTLINE, *words, env=ours(folder, "node"), stdout=log, stderr=log)
    try:
        until_ready(world)
        yield world
    finally:
        for process in (node, web):
            process.terminate()
            process.wait()


def ours(folder, side):
    """The environment of a side of ours; its cache folder is its own."""
    path = os.pathsep.join(filter(None, (torchvision_path(), os.environ.get("PYTHONPATH"))))
    given = {**os.environ, "XDG_CACHE_HOME": str(folder / f"cache-{side}"), "PYTHONPATH": path}
    given.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    return given


def until_ready(world):
    words = [sys.executable, "-c", ASKS, f"http://{world.link.address}:7070/v1/health", READY_S]
    if world.start("trainer", *words, stderr=subprocess.DEVNULL).wait():
        raise Skipped(f"the node was not ready: {(world.folder / 'node.log').read_text()[-500:]}")


def job(world, wanted):
    """One `frostline train --near`, as its report has it."""
    out = Path(tempfile.mkdtemp(dir=world.folder))
    words = ["train", "--near", f"http://{world.link.address}:7070", "--data", world.data, "--out", out / "run"]
    words += ["--model", wanted.model, "--until", wanted.until, "--json", *wanted.extra.split()]
    if wanted.weights:
        words += ["--weights", wanted.weights]
    if wanted.crops:
        words += ["--augment"]
    if wanted.quick or wanted.crops or wanted.weights:
        words += ["--epochs", wanted.epochs]
    trace = out / "trace.json" if PLAN in ways_of(wanted) else None
    words += ["--trace", trace] if trace else []
    began, steady_at = time.perf_counter(), time.time() + STEADY_S
    with (out / "report.json").open("w") as report, (out / "log.txt").open("w") as log:
        environment = ours(world.folder, "trainer")
        code = world.start("trainer", FROSTLINE, *words, env=environment, stdout=report, stderr=log).wait()
    seconds = time.perf_counter() - began
    if code:
        raise SystemExit(f"the job failed: {(out / 'log.txt').read_text()[-2000:]}")
    said = json.loads((out / "report.json").read_text())
    kept = ("setup_s", "first_step_s", "epochs", "wire_bytes", "ways", "engine")
    diagnosis = said.get("diagnosis") or {}
    return {
        "seconds": seconds,
        "accuracy": said.get("val_accuracy"),
        **{name: said.get(name) for name in kept},
        "diagnosis": diagnosis.get("says"),
        "samples_per_s": steady(trace, steady_at) if trace else None,
    }


def steady(trace, since):
    """Samples a second that a loop was handed from a time on, as long as they were computed; None behind that."""
    waits = [span for span in json.loads(trace.read_text()) if span["name"] == "wait"]
    ended = [((span["ts"] + span.get("dur", 0)) / 1e6, span["args"]) for span in waits]
    rest = [(at, about["samples"] - about["from_cache"]) for at, about in ended if at > since]
    last = max((at for at, samples in rest if samples), default=since)
    return sum(samples for _, samples in rest) / (last - since) if last > since else None


def plan(world, wanted):
    """What the linear programme gives for both sides and their link, as they are measured now."""
    words = ["plan", "--near", f"http://{world.link.address}:7070", "--data", world.data, "--measure", "--json"]
    words += ["--model", wanted.model, "--until", wanted.until, *wanted.extra.split()]
    words += ["--weights", wanted.weights] if wanted.weights else []
    began = time.perf_counter()
    asked = world.start("trainer", FROSTLINE, *words, env=ours(world.folder, "trainer"), stdout=subprocess.PIPE)
    said = asked.communicate()[0]
    if asked.returncode:
        raise SystemExit("the plan failed")
    return {"seconds": time.perf_counter() - began, "samples_per_s": json.loads(said)["samples_per_s"]}


def script_here(world, wanted):
    role = "crops" if wanted.crops else "here"
    said, seconds = world.script("trainer", role, world.listed, wanted.model, wanted.epochs, world.web)
    return {"seconds": seconds, **json.loads(said)}


def script_there(world, wanted):
    _, before = world.script("store", "there", world.listed, wanted.model, world.data / "features.npy", world.data)
    said, seconds = world.script("trainer", "train", world.listed, wanted.model, wanted.epochs, world.web)
    (world.data / "features.npy").unlink()
    return {"seconds": before + seconds, **json.loads(said)}


RUNS = {"first job": job, "second job": job, "script here": script_here, "script there": script_there, PLAN: plan}


def table(found):
    lines = []
    for mbit in dict.fromkeys(row["mbit"] for row in found["rows"]):
        here = [row for row in found["rows"] if row["mbit"] == mbit]
        scripts = [median([row for row in here if row["way"] == way], "seconds") for way in SCRIPTS]
        best = min((seconds for seconds in scripts if seconds is not None), default=None)
        for way in dict.fromkeys(row["way"] for row in here):
            rows = [row for row in here if row["way"] == way]
            seconds = median(rows, "seconds")
            ratio = None if way in (*SCRIPTS, PLAN) or best is None else best / seconds
            lines.append(
                [
                    f"{mbit:g}",
                    way,
                    spread([row["seconds"] for row in rows]),
                    median(rows, "first_step_s"),
                    median(rows, "accuracy"),
                    median(rows, "samples_per_s"),
                    "-" if ratio is None else f"{ratio:.2f}",
                    rows[-1].get("engine") or "-",
                ]
            )
    head = ["Mbit/s", "", "seconds", "first step, s", "accuracy", "steady samples/s", "ratio", "engine"]
    return f"{found['photographs']} photographs.\n\n{markdown(head, lines)}"


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, needs=(namespaces,), pictures=12)
