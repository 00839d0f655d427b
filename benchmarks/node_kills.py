"""Nodes are killed at random while a job trains: are losses those of an undisturbed run, and how long is each pause?

    python benchmarks/node_kills.py [--list ray|file|dns] [--nodes 3] [--seconds 300] [--every 10] [--out FILE]

With `--list ray` nodes are actors under a Ray of this machine, which starts them again, and the job finds them by
`ray://`. With `--list file` they are processes that this benchmark starts again itself, as a service of systemd would,
at new ports that it writes to a JSON list, by which the job finds them; with `--list dns` they keep their addresses,
which a name has while they listen. Every so many seconds one of those that live is killed by SIGKILL. The loop takes
batches at a fixed pace, as a trainer's own computing would, and keeps nothing. After it a plain PyTorch loop takes the
same steps, and all losses are compared bit by bit. A pause begins with a kill and ends when the second that follows has
90 % of the usual batches. What was asked for ahead may hide it or put it off: the longest wait for any batch of the run
is given beside it.
"""

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from harness import Skipped, markdown, run

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.events import NodeJoined
from frostline.node.process import start_node
from support import plain
from support.images import image_folder, tiny_preprocess
from support.many_nodes import frozen
from support.ray_here import NODE, ray_here, workers_of_ray
from support.servers import free_ports

BATCH = 16
CAUGHT_UP = 0.9
WARM = 20  # steps before the first kill
HOSTS = "FROSTLINE_HOSTS"


QUICK = {"list": "file", "nodes": 2, "seconds": 3.0, "every": 2.0, "pace": 30.0, "samples": 96}


def options(parser):
    parser.add_argument("--list", choices=LISTS, default="ray")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--samples", type=int, default=768)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one kill to the next")
    parser.add_argument("--pace", type=float, default=8.0, help="batches a second")


def root_for_names(wanted):
    if wanted.list == "dns" and os.geteuid() != 0:
        raise Skipped("it lays a file of its own over /etc/hosts, which takes root")


def measure(wanted):
    if wanted.list == "dns" and HOSTS not in os.environ:
        with_own_hosts()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        folder = image_folder(Path(scratch, "images"), per_class=wanted.samples // 3, size=(40, 36))
        with LISTS[wanted.list](folder, wanted) as (near, living):
            found = disturbed(folder, near, living, wanted)
        about = {"batch_size": BATCH, "epochs": found["epochs"]}
        expected = plain.losses(frozen(), folder, fl.Dataset(folder), tiny_preprocess(), **about)
    losses, ids, steps = (found.pop(name) for name in ("losses", "ids", "steps"))
    pauses = [pause(found["kills"], steps, index, wanted.pace) for index in range(len(found["kills"]))]
    return {
        "list": wanted.list,
        "nodes": wanted.nodes,
        "steps_per_s_asked": wanted.pace,
        "steps": len(losses),
        "samples": sum(map(len, ids)),
        "steps_per_s": len(steps) / (steps[-1] - steps[0]),
        "other_losses": sum(ours != theirs for ours, theirs in zip(losses, expected, strict=True)),
        "epochs_with_lost_or_doubled_samples": sum(is_odd(epoch, wanted.samples // 3 * 3) for epoch in ids),
        "pause_s": {"median": statistics.median(pauses), "max": max(pauses)} if pauses else None,
        "pauses_s": pauses,
        "longest_gap_between_batches_s": max(b - a for a, b in itertools.pairwise(steps)),
        **found,
    }


def is_odd(epoch, samples):
    return len(epoch) != samples or set(Counter(epoch).values()) != {1}


def table(found):
    pauses = found["pause_s"] or {"median": None, "max": None}
    rows = [
        ["kills", len(found["kills"])],
        ["steps", found["steps"]],
        ["losses that differ from a plain loop's", found["other_losses"]],
        ["epochs with samples lost or doubled", found["epochs_with_lost_or_doubled_samples"]],
        ["until the rate was 90 % again: median, s", pauses["median"]],
        ["worst, s", pauses["max"]],
        ["longest wait for a batch, s", found["longest_gap_between_batches_s"]],
    ]
    return markdown([f"the list of nodes: {found['list']}", ""], rows)


def disturbed(folder, near, living, wanted):
    """Train until the time is over, to the end of an epoch, while nodes are killed."""
    came, ended = [], threading.Event()

    def on_event(event):
        if isinstance(event, NodeJoined):
            came.append(event.url)

    settings = LoaderSettings(samples_per_request=8, device_batch=8, cache_bytes=0, retry_for_s=120)
    options = {"preprocess": tiny_preprocess(), "near": near, "accuracy": "exact", "settings": settings}
    losses, ids, steps, kills, epoch = [], [], [], [], 0
    with fl.offload(frozen(), fl.Dataset(folder), on_event=on_event, **options) as job:
        optimizer = torch.optim.SGD(job.head.parameters(), 0.1)
        killer = threading.Thread(target=kill, args=(living, kills, ended, wanted.every))
        began = time.monotonic()
        while not kills or time.monotonic() - began < wanted.seconds:
            ids.append([])
            for batch in job.loader(BATCH, shuffle=True, seed=0, epoch=epoch):
                losses.append(plain.step(job.head, optimizer, batch.features, batch.labels))
                ids[-1] += batch.ids.tolist()
                steps.append(time.monotonic() - began)
                if not kills and len(steps) == WARM:
                    killer.start()
                # A late batch is no debt that is paid back later: the pace is that of a trainer's own computing.
                time.sleep(1 / wanted.pace)
            epoch += 1
        ended.set()
        killer.join()
        statistics = job.statistics()
    return {
        "epochs": epoch,
        "losses": losses,
        "ids": ids,
        "steps": steps,
        "kills": [at - began for at in kills],
        "nodes_that_joined": len(came),
        "skipped": len(statistics.skipped),
    }


def kill(living, kills, ended, every_s):
    draw = random.Random(1)
    while not ended.wait(every_s):
        if there := living():
            kills.append(time.monotonic())
            os.kill(draw.choice(sorted(there)), signal.SIGKILL)


def pause(kills, steps, index, pace):
    """Seconds from a kill until the rate of the second that follows is near the pace again."""
    candidates = [kills[index], *(step for step in steps if step > kills[index])]
    for at in candidates:
        if sum(at <= step < at + 1 for step in steps) >= CAUGHT_UP * min(pace, 1 / median_gap(steps)):
            return at - kills[index]
    return float("inf")


def median_gap(steps):
    return statistics.median(b - a for a, b in itertools.pairwise(steps))


@contextmanager
def under_ray(folder, wanted):
    with ray_here() as here:
        here.cluster("up", "--data-root", folder, "--nodes", wanted.nodes, *NODE)
        os.environ["RAY_ADDRESS"] = here.address
        tempfile.tempdir = here.environment["TMPDIR"]  # by which its processes are told from another Ray's
        try:
            yield "ray://frostline", lambda: workers_of_ray("ray::NodeActor")
        finally:
            tempfile.tempdir = None
            here.cluster("down")


@contextmanager
def in_a_file(folder, wanted):
    """Processes that are started again at other ports; the list has those that listen."""
    listed = folder.parent / "nodes.json"

    def write(nodes):
        with tempfile.NamedTemporaryFile("w", dir=folder.parent, delete=False) as file:
            json.dump([node.url for node in nodes if node.pid], file)
        Path(file.name).replace(listed)

    with started_again(folder, [{} for _ in range(wanted.nodes)], write) as living:
        yield f"file://{listed}", living


@contextmanager
def by_a_name(folder, wanted):
    """Processes at addresses of their own, which they keep; the name has those that listen, as a headless service's."""
    [port] = free_ports(1)
    places = [{"host": f"127.0.0.{2 + number}", "port": port} for number in range(wanted.nodes)]

    def write(nodes):
        # In place: the file is mounted over /etc/hosts.
        there = [place["host"] for place, node in zip(places, nodes, strict=True) if node.pid]
        Path(os.environ[HOSTS]).write_text("".join(f"{host} nodes.test\n" for host in there))

    with started_again(folder, places, write) as living:
        yield f"dns://nodes.test:{port}", living


@contextmanager
def started_again(folder, places, write):
    """Nodes as processes, each of which is started again when it is gone; ``write`` is told of every change."""
    settings = NodeSettings(memory_bytes=256 << 20, device_batch=8, trial_s=0)
    roots, ended = (f"file://{folder}",), threading.Event()

    def start_again():
        while not ended.wait(0.2):
            for number, node in enumerate(nodes):
                if not node.pid:
                    write(nodes)
                    node.stop()
                    nodes[number] = start_node(roots, settings, **places[number])
                    write(nodes)

    with ExitStack() as stack:
        nodes = [start_node(roots, settings, **place) for place in places]
        write(nodes)
        again = threading.Thread(target=start_again)
        again.start()
        stack.callback(lambda: [node.stop() for node in nodes])
        stack.callback(again.join)
        stack.callback(ended.set)
        yield lambda: [node.pid for node in nodes if node.pid]


def with_own_hosts():
    """Run this again where a file of its own lies over /etc/hosts, in a mount namespace; it needs root."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder, "hosts")
        hosts.touch()
        mounted = 'mount --bind "$0" /etc/hosts && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mounted, hosts, sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(command, env={**os.environ, HOSTS: str(hosts)}).returncode)


LISTS = {"ray": under_ray, "file": in_a_file, "dns": by_a_name}


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, needs=(root_for_names,), data=False)
