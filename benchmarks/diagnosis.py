"""Bottlenecks that were planted for real: does a job's diagnosis name them, and is the gain what removing them gives?

    python benchmarks/diagnosis.py --data DIR [--seconds 24] [--rounds 1] [--only quota,starved] [--out FILE.json]

Node and trainer run in network namespaces of their own, each on one core, joined by a link that tc shapes, or by one
with a delay (`parts/wide_link.py`). Each case runs a job for some seconds with one thing in its way and once more
without it. Most loops wait for a step after each batch, as for an accelerator, so that a free job is as fast as that,
or as the node. Rates are those of the second half of a run; the samples a second of the free one over those of the
planted one are the gain that the planted one's diagnosis is compared with. It is asked every two seconds: whether it
names another part meanwhile is said too. Needs root, and a machine without other work.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path

from harness import Inside, ShapedLink, answer_questions, markdown, run, wide_links
from parts.wide_link import WideLink

MBIT, BATCH = 1000, 16
STEP_S = 0.1
PIXELS, WIDE = {"cut": 0}, "wide"
# The search for a window's bounds takes a minute and more where a link is thin, and as long as it asks for more, more
# arrives than is handed out. With a fixed number of requests a run of some seconds is a steady one.
IN_FLIGHT = 4
# Epochs of a few seconds over a link that is thin both with and without what is planted.
REPEATED = {"cut": 2, "samples": 128, "mbit": 60}
TOKEN = "the-token"
# What an earlier run left on the node's disk would hide the store of this one.
KEEPS_NONE = {"local_tier_bytes": 0}
LOOP, LINK, NODE, STORES = "the training loop", "the link", "the node's compute", "the store"
ROUND_TRIP, QUOTA, SHARE, CACHE = "the round trip", "a quota", "its share", "the cache"
PROCESSORS = "this machine's processors"


def case(part, *, both=None, times=1, **planted):
    """A bottleneck: what it is to be called, what the free job has too, and what is planted beside.

    A planted run takes some times the usual seconds where it takes so long until batches come steadily.
    """
    return {"part": part, "both": {"step_s": STEP_S, **(both or {})}, "planted": planted, "times": times}


# Of the keys `mbit`, `node` (environment), `tenant`, `share` (bytes a second), and `busy` (loops on a core, by core)
# are planted around the job; all others are options of the trainer. A free job has the link without its delay.
CASES = {
    "slow_loop": case(LOOP, both={"step_s": 0.0}, step_s=0.5),
    "busy_loop": case(LOOP, both={"step_s": 0.0}, busy_s=0.25),
    "thin_link": case(LINK, times=2, both=PIXELS, mbit=20),
    "thin_link_no_step": case(LINK, times=2, both={**PIXELS, "step_s": 0.0}, mbit=40),
    "thin_link_features": case(LINK, times=2, both={"cut": 2}, mbit=100),
    "thin_link_small_features": case(LINK, times=2, mbit=4),
    "long_link": case(ROUND_TRIP, round_trip_ms=400, requests_in_flight=1),
    "long_link_pixels": case(ROUND_TRIP, times=2, both=PIXELS, round_trip_ms=400, requests_in_flight=1),
    "slow_node": case(NODE, network=WIDE),
    "busy_node": case(NODE, busy={0: 6}),
    "throttled_store": case(STORES, both={"in_s3": True}, node={"FROSTLINE_STORE_REQUESTS_PER_S": "60"}),
    "throttled_store_pixels": case(
        STORES, times=2, both={"in_s3": True, **PIXELS}, node={"FROSTLINE_STORE_REQUESTS_PER_S": "30"}
    ),
    "quota": case(QUOTA, times=2, tenant={"device_s_per_s": 0.02}),
    "quota_features": case(QUOTA, times=2, both={"cut": 2}, tenant={"device_s_per_s": 0.01}),
    "share_of_bytes": case(SHARE, both=PIXELS, share={"bytes_per_s": 2e6}),
    "share_of_requests": case(SHARE, share={"requests_per_s": 2.0}),
    "starved": case(PROCESSORS, both={**PIXELS, "step_s": 0.0}, busy={1: 4}),
    "starved_by_one": case(PROCESSORS, both={**PIXELS, "step_s": 0.02}, busy={1: 1}),
    "full_cache": case(CACHE, both={**REPEATED, "cache_bytes": 1 << 30}, cache_bytes=65536),
    "full_cache_disk": case(CACHE, both={**REPEATED, "disk_bytes": 1 << 30, "cache_bytes": 65536}, disk_mb=2),
}
AROUND = ("mbit", "node", "tenant", "share", "busy", "round_trip_ms", "in_s3", "disk_mb")


QUICK = {"only": "thin_link", "seconds": 1.5, "times": False}


def options(parser):
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--only", help="cases with commas between them; all by default")
    parser.add_argument("--times", type=bool, default=True, help="let some planted runs take longer")


def measure(wanted):
    rows = []
    for number, name in itertools.product(range(wanted.rounds), (wanted.only or ",".join(CASES)).split(",")):
        rows.append({"round": number, **one_case(wanted, name)})
        yield {"rows": rows}


def table(found):
    rows = []
    for row in found["rows"]:
        said = row["planted"]["diagnosis"]
        words = [row["case"], said["held_back_by"], "yes" if row["is_named"] else "NO", said["gain"], row["gain"]]
        rows.append([*words, ", ".join(row["planted"]["named"]) if not row["is_steady"] else ""])
    head = ["planted", "named", "right", "gain expected", "gain when removed", "named meanwhile"]
    named, near, steady = (sum(row[name] for row in found["rows"]) for name in ("is_named", "is_near", "is_steady"))
    after = f"Of {len(rows)}: named {named}, gain within 20 % {near}, named alike all the time {steady}."
    return f"{markdown(head, rows)}\n\n{after}"


def one_case(wanted, name):
    """The planted run and the free one; the quick form does without that, whose code is the same."""
    planted = measured(wanted, name, is_planted=True)
    free = None if wanted.quick else measured(wanted, name, is_planted=False)
    gain = free and free["samples_per_s"] / planted["samples_per_s"]
    said = planted["diagnosis"]
    is_named = said["held_back_by"] == CASES[name]["part"]
    return {
        "case": name,
        "planted": planted,
        "free": free,
        "gain": gain,
        "is_named": is_named,
        "is_near": bool(is_named and gain and abs(said["gain"] - gain) <= 0.2 * gain),
        "is_steady": len(set(planted["named"])) <= 1,
    }


def measured(wanted, name, *, is_planted):
    """One job of some seconds, with what is planted or without it."""
    options = {**CASES[name]["both"], **(CASES[name]["planted"] if is_planted else {})}
    around = {key: options.pop(key) for key in AROUND if key in options}
    with ExitStack() as stack:
        link = stack.enter_context(the_link(CASES[name]["planted"], around))
        for core, number in around.get("busy", {}).items():
            for _ in range(number):
                stack.enter_context(busy_loop(core))
        given = {key: around[key] for key in ("tenant", "share", "in_s3") if key in around}
        given |= {"host": link.address, "disk_mb": around.get("disk_mb", 0)}
        environment = around.get("node")
        node = stack.enter_context(Inside(link.store, 0, "node", wanted, environment=environment, options=given))
        trainer = stack.enter_context(Inside(link.trainer, 1, "trainer", wanted, options=given))
        seconds = wanted.seconds * (CASES[name]["times"] if is_planted and wanted.times else 1)
        return trainer.ask(do="train", **node.answer(), seconds=seconds, options=options)


def the_link(planted, around):
    """The namespaces with their link."""
    if "round_trip_ms" in planted:
        return WideLink(round_trip_ms=around.get("round_trip_ms", 0.0), mbit=MBIT)
    return ShapedLink(around.get("mbit", MBIT))


@contextmanager
def busy_loop(core):
    # It ends with this program, whatever ends that.
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10**5))"
    loop = subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", spin])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def node_inside(wanted):
    """Serve the data over HTTP until standard input ends, and divide what is to be divided."""
    from frostline.core.config import NodeSettings, TenantSettings
    from frostline.node.process import start_node

    given = wanted.options
    job = TenantSettings(name="job", token_sha256=sha256(TOKEN.encode()).hexdigest(), **given.get("tenant", {}))
    settings = NodeSettings(
        memory_bytes=2 << 30, compute_threads=1, decode_threads=1, trial_s=0, tenants=(job,), **KEEPS_NONE
    )
    with (
        stored(wanted) as data,
        controlled(given) as control,
        start_node((data,), settings, host=given["host"]) as node,
    ):
        print(json.dumps({"url": node.url, "data": data, "control": control}), flush=True)
        sys.stdin.read()


@contextmanager
def stored(wanted):
    """The data's URL: of its folder, or of a bucket of a real S3 server beside the node."""
    if not wanted.options.get("in_s3"):
        yield str(Path(wanted.data).resolve())
        return
    from support.seaweed import seaweed

    with tempfile.TemporaryDirectory() as place, seaweed(Path(place)) as server:
        server.make_bucket("photographs")
        server.put_folder(Path(wanted.data), "photographs")
        os.environ |= server.environment()
        yield "s3://photographs"


@contextmanager
def controlled(given):
    """A control plane that divides the share; gives its URL, None where there is nothing to divide."""
    if "share" not in given:
        yield None
        return
    with tempfile.TemporaryDirectory() as place:
        config, port = Path(place, "control.toml"), 7075
        lines = ["[capacity]", *(f"{name} = {value}" for name, value in given["share"].items())]
        lines += ["[[tenant]]", 'name = "job"', f'token_sha256 = "{sha256(TOKEN.encode()).hexdigest()}"', ""]
        config.write_text("\n".join(lines))
        command = [str(Path(sys.executable).with_name("frostline")), "control", "--config", str(config), "--json"]
        command += ["--listen", f"{given['host']}:{port}", "--state", str(Path(place, "state"))]
        plane = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        plane.stdout.readline()  # it says when it listens
        try:
            yield f"http://{given['host']}:{port}?job=planted"
        finally:
            plane.terminate()
            plane.communicate()


def trainer_inside(wanted):
    with tempfile.TemporaryDirectory() as folder, small_disk(folder, wanted.options["disk_mb"]):
        answer_questions({"train": lambda **asked: train(folder=folder, **asked)})


def small_disk(folder, megabytes):
    """A file system of so many megabytes at the folder; none where there are 0."""
    return nullcontext() if not megabytes else mounted(folder, megabytes)


@contextmanager
def mounted(folder, megabytes):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def network(kind):
    """A convolution, and where it is to be slow at the node a dozen wide ones; one linear layer is trained."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    body = [nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2), nn.ReLU()]
    if kind == WIDE:
        body += [layer for _ in range(72) for layer in (nn.Conv2d(8, 8, 15, padding=7), nn.ReLU())]
    body += [nn.AdaptiveAvgPool2d(16), nn.Flatten()]
    model = nn.Sequential(nn.Sequential(*body), nn.Linear(2048, 6))
    model[0].requires_grad_(False)
    return model


def train(*, url, data, control, seconds, folder, options):
    """Take batches for some seconds, epoch after epoch, and say what the job says of itself meanwhile."""
    import numpy as np

    import frostline as fl

    settings = {"cache_bytes": options.get("cache_bytes", 0), "cache_disk_bytes": 0, "token": TOKEN, "control": control}
    settings |= {"requests_in_flight": options.get("requests_in_flight", IN_FLIGHT)}
    if "disk_bytes" in options:
        settings |= {"cache_folder": folder, "cache_disk_bytes": options["disk_bytes"]}
    data = fl.Dataset(data, near=url, token=TOKEN)
    data = data.take(np.arange(options["samples"])) if "samples" in options else data
    with fl.offload(
        network(options.get("network")),
        data,
        near=url,
        cut=options.get("cut"),
        accuracy="exact",
        settings=fl.LoaderSettings(**settings),
    ) as job:
        found = watched(job, data, seconds, options)
        said = job.diagnosis()
        done = job.statistics()
        counts = ("samples", "wire_bytes", "payload_bytes", "requests", "answered", "retries", "hedges", "stall_s")
        found["statistics"] = {name: getattr(done, name) for name in counts}
        found["statistics"]["tunings"] = [(one.at_s, one.requests, one.window_bytes) for one in done.tunings]
        return {"diagnosis": said.to_json(), "says": str(said), **found}


def watched(job, data, seconds, options):
    """The rate of the second half of some seconds, and which parts were named in it."""
    started, half, samples, named, is_over = time.perf_counter(), None, 0, [], threading.Event()
    # To ask for the diagnosis asks the node: the loop must not wait for that.
    asking = threading.Thread(target=ask, args=(job, seconds / 2, named, is_over))
    asking.start()
    passes = (job.loader(BATCH, shuffle=True, epoch=epoch, data=data) for epoch in itertools.count())
    for batch in itertools.chain.from_iterable(passes):
        now = time.perf_counter() - started
        if half is not None:
            samples += len(batch.labels)
        elif now >= seconds / 2:
            half = now
        if now >= seconds and samples:
            break
        step(options)
    is_over.set()
    asking.join()
    return {"samples_per_s": samples / (now - half), "named": named}


def ask(job, first_s, named, is_over):
    is_over.wait(first_s)
    while not is_over.wait(2.0):
        named.append(job.diagnosis().held_back_by)


def step(options):
    """What a loop does with a batch: wait for an accelerator, or compute itself."""
    time.sleep(options.get("step_s", 0.0))
    until = time.perf_counter() + options.get("busy_s", 0.0)
    while time.perf_counter() < until:
        pass


INSIDE = {"node": node_inside, "trainer": trainer_inside}

if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, inside=INSIDE, needs=(wide_links,))
