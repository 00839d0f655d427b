"""What the checkpoints of a run with --out cost: processor time, bytes and how many there are.

    python benchmarks/checkpoints.py --data DIR [--rounds 3] [--train="--epochs 40"] [--out FILE]

Each round is ``frostline train --out`` at its defaults, in a process of its own and with an empty cache folder. The
processor time of what keeps checkpoints is counted by its own thread, so that neighbours on the machine change little;
it is given beside that of the trainer's whole process and of its node. Bytes are those of the files as written.
Then the checkpoint of a large head is written five times, without a run.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from frostline.engines.machine import hardware_name

MODEL = ("--model", "demo:efficientnet_lite0", "--until", "features")


def main():
    wanted = arguments()
    if wanted.inside is not None:
        inside(wanted)
        return
    rounds = [a_round(wanted) for _ in range(wanted.rounds)]
    middle = {name: statistics.median(run[name] for run in rounds) for name in rounds[0]}
    print(
        f"{middle['checkpoints']:.0f} checkpoints, {middle['bytes'] / 1e6:.2f} MB in all: "
        f"{middle['keeping_cpu_s'] * 1e3:.0f} ms of the trainer's {middle['trainer_cpu_s']:.1f} s of processor time, "
        f"{middle['keeping_cpu_s'] / (middle['trainer_cpu_s'] + middle['node_cpu_s']):.2%} of the job's; "
        f"{middle['steps']:.0f} steps in {middle['epochs']:.0f} epochs"
    )
    large = large_head()
    print(
        f"a head of {large['parameters'] / 1e6:.1f} million parameters: {large['bytes'] / 1e6:.0f} MB and "
        f"{large['cpu_s'] * 1e3:.0f} ms of processor time a checkpoint"
    )
    if wanted.out is not None:
        from frostline.training.report.report import versions

        about = {"hardware": hardware_name("cpu"), "versions": dict(versions()), "data": Path(wanted.data).name}
        wanted.out.write_text(
            json.dumps(
                {**about, "train": wanted.train, "rounds": rounds, "median": middle, "large_head": large}, indent=2
            )
            + "\n"
        )


def a_round(wanted):
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, __file__, "--data", wanted.data, "--inside", str(figures), f"--train={wanted.train}"]
        subprocess.run(command, check=True, env={**os.environ, "XDG_CACHE_HOME": folder}, stdout=subprocess.DEVNULL)
        print(figures.read_text(), file=sys.stderr, flush=True)
        return json.loads(figures.read_text())


def large_head(parameters=8_400_000, rounds=5):
    """One checkpoint of the last block of ResNet-18 with Adam, and with the best head so far."""
    import torch

    from frostline.training.loop import Checkpoint
    from frostline.training.run_folder import CheckpointFolder

    def tensors(*names):
        return {name: torch.randn(parameters) for name in names}

    checkpoint = Checkpoint(
        epoch=0,
        epoch_steps=1,
        steps=0,
        order=None,
        losses=(1.0,),
        epoch_losses=(),
        samples=1,
        head=tensors("weight"),
        optimizer=tensors("0.exp_avg", "0.exp_avg_sq"),
        best=tensors("weight"),
    )
    with tempfile.TemporaryDirectory() as folder:
        spent = []
        for _ in range(rounds):
            began = time.thread_time()
            CheckpointFolder(Path(folder)).keep(checkpoint)
            spent.append(time.thread_time() - began)
        size = max(path.stat().st_size for path in Path(folder, "checkpoints").iterdir())
    return {"parameters": parameters, "bytes": size, "cpu_s": statistics.median(spent)}


def inside(wanted):
    """One run, whose every call that keeps a checkpoint is timed."""
    from frostline.cli import main as frostline
    from frostline.training.run_folder import CheckpointFolder

    keep, is_due, spent = CheckpointFolder.keep, CheckpointFolder.is_due, {"keep": [], "asked": 0.0, "bytes": 0}

    def timed(self, checkpoint):
        began = time.thread_time()
        keep(self, checkpoint)
        spent["keep"].append(time.thread_time() - began)
        newest = max((out / "checkpoints").iterdir())
        spent["bytes"] += newest.stat().st_size

    def asked(self, step, *, ends_epoch):
        began = time.thread_time()
        found = is_due(self, step, ends_epoch=ends_epoch)
        spent["asked"] += time.thread_time() - began
        return found

    CheckpointFolder.keep, CheckpointFolder.is_due = timed, asked
    out = Path(os.environ["XDG_CACHE_HOME"], "run")
    try:
        frostline(["train", "--data", wanted.data, *MODEL, *shlex.split(wanted.train), "--out", str(out)])
    except SystemExit as ended:
        if ended.code:
            raise
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    report = json.loads((out / "report.json").read_text())
    figures = {
        "checkpoints": len(spent["keep"]),
        "bytes": spent["bytes"],
        "keeping_cpu_s": sum(spent["keep"]) + spent["asked"],
        "longest_cpu_s": max(spent["keep"], default=0.0),
        "trainer_cpu_s": own.ru_utime + own.ru_stime,
        "node_cpu_s": children.ru_utime + children.ru_stime,
        "epochs": report["epochs"],
        "steps": len(report["losses"]),
        "seconds": report["seconds"],
    }
    wanted.inside.write_text(json.dumps(figures))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", default="", help="further options of frostline train")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
