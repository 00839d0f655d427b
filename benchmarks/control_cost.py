"""What statistics, tuning and control take of the processor time of a job that waits for its share of the bytes.

    PYTHONPATH=src python benchmarks/control_cost.py --data DIR [--mb 2.3] [--seconds 20] [--out FILE]

A job reads encoded photographs from a node, decodes them and trains a small network, and keeps to so many megabytes a
second, which a control plane gives it. Then the same without control and without that bound. Node and control plane are
processes beside it. Processor time of calls is counted in the job's own threads, the outermost ones alone, with what
counting them takes.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import fleet_job

import frostline as fl


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--mb", type=float, default=2.3, help="megabytes a second that the control plane gives")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    node, plane = (f"127.0.0.1:{free_port()}" for _ in range(2))
    step, costs = fleet_job.pytorch_step(), fleet_job.Costs()
    costs.count_all()
    with (
        tempfile.TemporaryDirectory() as folder,
        served("serve", "--data-root", wanted.data, "--listen", node, "--open"),
    ):
        config = Path(folder) / "control.toml"
        config.write_text(f"[capacity]\nbytes_per_s = {wanted.mb * 1e6}\n")
        state = str(Path(folder) / "state")
        with served("control", "--config", str(config), "--listen", plane, "--state", state):
            data = fl.Dataset(wanted.data)
            run(data, node, None, 3, step, costs)  # what is imported and listed first does not count
            found = {
                "command": sys.argv[1:],
                "load": os.getloadavg()[0],
                "waits": run(data, node, f"http://{plane}?job=waits", wanted.seconds, step, costs),
                "without_control": run(data, node, None, wanted.seconds, step, costs),
            }
    text = json.dumps(found, indent=1)
    print(text)
    if wanted.out:
        wanted.out.write_text(text + "\n", encoding="utf-8")


def run(data, node, control, seconds, step, costs):
    found = fleet_job.run(
        "pytorch",
        data,
        [f"http://{node}"],
        step,
        costs,
        name="job",
        until=time.time() + seconds,
        control=control,
        token=None,
        requests=None,
        per_request=4,
    )
    kept = ("seconds", "bytes", "samples", "processor_s")
    watching_s = sum(found["watching_s"].values())
    return {
        **{name: found[name] for name in kept},
        "watching_s": found["watching_s"],
        "watching_share": watching_s / found["processor_s"],
        "watching_ms_per_s": 1000 * watching_s / found["seconds"],
    }


@contextmanager
def served(*arguments):
    """A process of Frostline's command line, from its first line of output on."""
    command = [sys.executable, str(Path(__file__).with_name("fleet_job.py")), *arguments, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not process.stdout.readline():
                raise SystemExit(f"{arguments[0]} did not start")
            yield
        finally:
            process.send_signal(signal.SIGINT)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
