"""What it costs a job and its node that the job is seen there: reports, and a diagnosis every five seconds.

    PYTHONPATH=src python benchmarks/job_reports.py [--seconds 30] [--reports 1000] [--out FILE]

The job is a real one on a node in a process of its own: a network of 25 cuts over images of 64 pixels, with a loop that
takes a batch of 16 every tenth of a second. Seconds are processor seconds: the job's are those of its threads that
report and diagnose, until they end; the node's those of its process, for many reports one after another on one
connection, and for many diagnoses.
"""

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from torch import nn

import frostline as fl
from frostline.control.messages import ControlledStage, Hindrance, JobActivity, PlanOutline
from frostline.control.shares import Amounts
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.node.process import start_node
from support.nodes import make_images, preprocess

SIDE, BATCH, PAUSE_S = 64, 16, 0.1
THREADS = ("frostline-control", "frostline-diagnosis")
SPENT_S = Counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--reports", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    count_threads()
    torch.set_num_threads(1)
    settings = NodeSettings(memory_bytes=512 << 20, device_batch=8, compute_threads=1, trial_s=0)
    with tempfile.TemporaryDirectory() as folder:
        images = make_images(Path(folder) / "images", 400, size=(80, 80))
        with start_node((images.as_uri(),), settings) as node:
            figures = {"load": os.getloadavg()[0], **run(node.url, images, wanted)}
            figures |= reports_at(node.url, wanted.reports)
    figures["command"] = sys.argv[1:]
    text = json.dumps(figures, indent=1)
    print(text)
    if wanted.out:
        wanted.out.write_text(text + "\n", encoding="utf-8")


def count_threads():
    """Have every thread say its processor seconds at its end, by its name."""
    run_thread = threading.Thread.run

    def counted(thread):
        try:
            run_thread(thread)
        finally:
            SPENT_S[thread.name] += time.thread_time()

    threading.Thread.run = counted


def network():
    blocks = [layer for _ in range(10) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    layers = [nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    return fl.freeze(nn.Sequential(*layers), until=str(len(layers) - 2))


def run(url, images, wanted):
    """A job of so many seconds: the share of them that its reports took, and what a diagnosis takes on both sides."""
    data, settings = fl.Dataset(images.as_uri()), LoaderSettings(control=None, cache_bytes=0, samples_per_request=8)
    with fl.offload(network(), data, preprocess=preprocess(SIDE), near=url, settings=settings) as job:
        began_s, own_s, epoch = time.monotonic(), time.process_time(), 0
        while time.monotonic() - began_s < wanted.seconds:
            for _ in job.loader(BATCH, shuffle=True, epoch=epoch):
                time.sleep(PAUSE_S)
            epoch += 1
        passed_s, own_s = time.monotonic() - began_s, time.process_time() - own_s
        looks, node_s, here_s = 200, node_cpu_s(url), time.thread_time()
        for _ in range(looks):
            job.diagnosis()
        diagnosis_ms = 1e3 * (time.thread_time() - here_s) / looks
        node_diagnosis_ms = 1e3 * (node_cpu_s(url) - node_s) / looks
        samples, cuts = job.statistics().samples, len(job.cuts)
    return {
        "cuts": cuts,
        "seconds": passed_s,
        "samples": samples,
        "job_processor_s": own_s,
        "thread_s": {name: SPENT_S[name] for name in THREADS},
        "of_the_time": sum(SPENT_S[name] for name in THREADS) / passed_s,
        "of_the_job_s_processor_time": sum(SPENT_S[name] for name in THREADS) / own_s,
        "diagnosis_ms": diagnosis_ms,
        "node_diagnosis_ms": node_diagnosis_ms,
    }


def reports_at(url, reports):
    """Processor seconds of the node for a report."""
    plan = PlanOutline(names=("layer1.0.relu:relu",) * 25, nbytes=(65536,) * 25, cut=24, codec="exact")
    why = Hindrance(held_back_by="the node's compute", says="held back by the node's compute " * 8, gain=2.0)
    whole, brief = JobActivity(samples=1, hindrance=why, plan=plan), JobActivity(samples=1)
    stage, parts = ControlledStage(stage="cost", job="cost"), urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    before_s = node_cpu_s(url)
    for number in range(reports):  # of five one has all, as of a job
        report = stage.report(Amounts(), activity=brief if number % 5 else whole)
        connection.request("POST", "/v1/stages", json.dumps(report.to_json()))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    spent_s = node_cpu_s(url) - before_s
    connection.close()
    return {"reports": reports, "node_report_ms": 1e3 * spent_s / reports}


def node_cpu_s(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    connection.request("GET", "/v1/statistics")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found["cpu_s"]


if __name__ == "__main__":
    main()
