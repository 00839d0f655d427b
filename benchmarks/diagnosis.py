"""Bottlenecks that were planted for real: does a job's diagnosis name them, and is the gain what removing them gives?

    python benchmarks/diagnosis.py --data DIR [--seconds 12] [--rounds 1] [--only thin_link,quota] [--out FILE.json]

Node and trainer run in network namespaces of their own, each on one core, joined by a link that tc shapes. Each case
runs a job for some seconds with one thing in its way and once more without it; the samples a second of the second over
those of the first, as the loop got them, are the gain that the first run's diagnosis is compared with. Needs root.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from links import STORE, STORE_ADDRESS, TRAINER, Inside, ShapedLink, answer_questions

MBIT, THIN_MBIT = 1000, 8
BATCH = 16
WIDE = "wide"
TOKEN = "the-token"

# What is planted, what it should be called, and how: of the link, the node's environment and options, and the trainer.
CASES = {
    "slow_loop": {"names": ["the training loop"], "trainer": {"pause_s": 0.4}},
    "thin_link": {"names": ["the link"], "link": {"mbit": THIN_MBIT}, "trainer": {"cut": 0}},
    "thin_link_features": {"names": ["the link"], "link": {"mbit": THIN_MBIT}, "trainer": {"cut": 2}},
    "slow_node": {"names": ["the node's compute"], "trainer": {"network": WIDE}},
    "throttled_store": {"names": ["the store"], "node": {"FROSTLINE_STORE_REQUESTS_PER_S": "60"}, "store": "s3"},
    "quota": {"names": ["a quota"], "tenant": {"device_s_per_s": 0.05}},
    "quota_requests": {"names": ["a quota"], "tenant": {"requests": 1}},
    "starved": {"names": ["this machine's processors"], "busy_loops": 4, "trainer": {"cut": 0}},
    "full_cache": {"names": ["the cache"], "trainer": {"cache_bytes": 65536, "cut": 2}},
}


def main():
    wanted = arguments()
    if wanted.inside:
        {"node": node_inside, "trainer": trainer_inside}[wanted.inside](wanted)
        return
    chosen = [name for name in CASES if name in (wanted.only or CASES)]
    rows = []
    with ShapedLink() as link:
        for number, name in itertools.product(range(wanted.rounds), chosen):
            rows.append({"round": number, **one_case(wanted, link, name)})
            print(line(rows[-1]), flush=True)
            if wanted.out:
                report = {"command": sys.argv[1:], "load": os.getloadavg(), "rows": rows}
                Path(wanted.out).write_text(json.dumps(report, indent=1) + "\n")
    named = sum(row["is_named"] for row in rows)
    print(f"{named} of {len(rows)} were named; gain within 20 %: {sum(row['is_near'] for row in rows)}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folders of photographs, one a class")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--out")
    parser.add_argument("--inside")
    parser.add_argument("--in-s3", action="store_true")
    parser.add_argument("--tenant", type=json.loads, default={})
    return parser.parse_args()


def one_case(wanted, link, name):
    case = CASES[name]
    planted = measured(wanted, link, case, is_planted=True)
    free = measured(wanted, link, case, is_planted=False)
    gain = free["samples_per_s"] / planted["samples_per_s"]
    said = planted["diagnosis"]
    is_named = said["held_back_by"] in case["names"]
    expected = said["gain"]
    return {
        "case": name,
        "planted": planted,
        "free": free,
        "gain": gain,
        "is_named": is_named,
        "is_near": is_named and abs(expected - gain) <= 0.2 * gain,
    }


def measured(wanted, link, case, *, is_planted):
    """One job of some seconds, with what is planted or without it."""
    shape = case.get("link", {}) if is_planted else {}
    link.rate(shape.get("mbit", MBIT))
    environment = case.get("node", {}) if is_planted else {}
    tenant = json.dumps(case.get("tenant", {}) if is_planted else {})
    options = {**case.get("trainer", {})}
    if not is_planted:
        removed = ("pause_s", "network", "cache_bytes")
        options = {name: value for name, value in options.items() if name not in removed}
    loops = [busy_loop() for _ in range(case.get("busy_loops", 0) if is_planted else 0)]
    node_options = ["--inside", "node", "--data", wanted.data, "--tenant", tenant]
    node_options += ["--in-s3"] if case.get("store") == "s3" else []
    try:
        with (
            Inside(STORE, 0, __file__, *node_options, environment=environment) as node,
            Inside(TRAINER, 1, __file__, "--inside", "trainer", "--data", wanted.data) as trainer,
        ):
            served = node.answer()
            return trainer.ask(do="train", **served, seconds=wanted.seconds, options=options)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def busy_loop():
    return subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"])


def line(row):
    said = row["planted"]["diagnosis"]
    return (
        f"{row['case']:20} {'named ' if row['is_named'] else 'MISSED'} {said['held_back_by']:28} "
        f"gain {said['gain']:.2f} expected, {row['gain']:.2f} measured"
    )


def node_inside(wanted):
    """Serve the data over HTTP until standard input ends."""
    from frostline.config import NodeSettings, TenantSettings
    from frostline.node.process.subprocess import start_node

    job = TenantSettings(name="job", token_sha256=sha256(TOKEN.encode()).hexdigest(), **wanted.tenant)
    settings = NodeSettings(memory_bytes=2 << 30, compute_threads=1, decode_threads=1, trial_s=0, tenants=(job,))
    with stored(wanted) as data, start_node((data,), settings, host=STORE_ADDRESS) as node:
        print(json.dumps({"url": node.url, "data": data}), flush=True)
        sys.stdin.read()


@contextmanager
def stored(wanted):
    """The data's URL: of its folder, or of a bucket of a real S3 server beside the node."""
    if not wanted.in_s3:
        yield str(Path(wanted.data).resolve())
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.seaweed import seaweed

    with tempfile.TemporaryDirectory() as place, seaweed(Path(place)) as server:
        server.make_bucket("photographs")
        server.put_folder(Path(wanted.data), "photographs")
        os.environ |= server.environment()
        yield "s3://photographs"


def trainer_inside(_):
    answer_questions({"train": train})


def network(kind):
    """A convolution, and where it is to be slow at the node a dozen wide ones; one linear layer is trained."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    body = [nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2), nn.ReLU()]
    if kind == WIDE:
        body += [layer for _ in range(8) for layer in (nn.Conv2d(8, 8, 15, padding=7), nn.ReLU())]
    body += [nn.AdaptiveAvgPool2d(8), nn.Flatten()]
    model = nn.Sequential(nn.Sequential(*body), nn.Linear(512, 6))
    model[0].requires_grad_(False)
    return model


def train(*, url, data, seconds, options):
    """Take batches for some seconds, and two at least, epoch after epoch, and say what the job says of itself."""
    import numpy as np

    import frostline as fl
    from frostline.config import LoaderSettings

    settings = {"cache_bytes": options.get("cache_bytes", 0), "token": TOKEN, "hedge_quantile": 1.0}
    data = fl.Dataset(data, near=url, token=TOKEN)
    # A full cache is only seen where epochs come again within the run.
    data = data.take(np.arange(256)) if "cache_bytes" in options else data
    with fl.offload(
        network(options.get("network")),
        data,
        near=url,
        cut=options.get("cut"),
        accuracy="exact",
        settings=LoaderSettings(**settings),
    ) as job:
        started, first, samples = time.perf_counter(), None, 0
        for epoch in itertools.count():
            for batch in job.loader(BATCH, shuffle=True, epoch=epoch, data=data):
                now = time.perf_counter()
                time.sleep(options.get("pause_s", 0.0))
                if first is None and now - started > 1.0:
                    first = now
                elif first is not None:
                    samples, last = samples + len(batch.labels), now
                if now - started > seconds and samples:
                    break
            else:
                continue
            break
        found = job.diagnosis()
        return {"diagnosis": found.to_json(), "says": str(found), "samples_per_s": samples / (last - first)}


if __name__ == "__main__":
    main()
