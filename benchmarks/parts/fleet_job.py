"""What runs in each process of fleet.py: a job that trains for a while whenever it is asked to."""

import functools
import hashlib
import logging
import threading
import time
from pathlib import Path

BATCH = 16
# Batches of which the order is compared between runs.
ORDERED = 8
COURSE_S = 0.25


def paths(framework):
    """Folders beside Frostline's own that a process of a framework needs."""
    return [str(Path(__file__).resolve().parents[2] / "build" / "frameworks")] if framework == "tensorflow" else []


def main(framework, data, nodes):
    from harness import answer_questions

    import frostline as fl

    step = {"pytorch": pytorch_step, "tensorflow": tensorflow_step}[framework]()
    costs = Costs()
    costs.count_all()
    print('"ready"', flush=True)
    answer_questions({"run": functools.partial(run, framework, fl.Dataset(data), nodes, step, costs)})


def run(framework, data, nodes, step, costs, *, name, until, control, token, requests, per_request, work_bytes=None):
    """Train until a time, or until so many bytes have come; give the course of bytes, and what all of it cost."""
    import frostline as fl
    from frostline.core.config import LoaderSettings

    heard = Heard()
    settings = LoaderSettings(
        control=control,
        token=token,
        requests_in_flight=requests,
        samples_per_request=per_request,
        cache_bytes=0,
        max_reorder=0,
    )
    began, before_s, costs.seconds, ids, course = time.time(), time.process_time(), {}, [], []
    preprocess = fl.preprocess.imagenet(128)
    with fl.offload(None, data, preprocess=preprocess, near=nodes, cut=0, settings=settings) as job, heard:
        ended = threading.Event()
        course.append((time.time(), 0))
        watch = threading.Thread(target=follow, args=(job, course, ended))
        watch.start()
        for batch_ids in trained(framework, job, step):
            ids.append(batch_ids)
            if time.time() >= until or (work_bytes and course[-1][1] >= work_bytes):
                break
        at = time.time()
        ended.set()
        watch.join()
        samples = job.statistics().samples
    seconds, used_s = time.time() - began, time.process_time() - before_s
    done = [when for when, nbytes in course if work_bytes and nbytes >= work_bytes]
    return {
        "name": name,
        "framework": framework,
        "course": course,
        "ended": min(done, default=at),
        "seconds": seconds,
        "bytes": course[-1][1],
        "samples": samples,
        "order": hashlib.sha256(repr(ids[:ORDERED]).encode()).hexdigest()[:16] if len(ids) >= ORDERED else None,
        "processor_s": used_s,
        "watching_s": costs.seconds,
        "warnings": heard.said,
    }


def trained(framework, job, step):
    """Train epoch after epoch; yields the ids of each batch once it is learned."""
    for epoch in range(1_000_000):
        options = {"shuffle": True, "seed": 5, "epoch": epoch}
        if framework == "pytorch":
            for batch in job.loader(BATCH, **options):
                step(batch.features, batch.labels)
                yield batch.ids.tolist()
        else:
            from frostline.loaders.adapters.tensorflow import TensorFlowLoader

            loader = TensorFlowLoader(job.arrays(BATCH, **options), columns=("features", "labels", "ids"))
            for features, labels, ids in loader:
                step(features, labels)
                yield ids.numpy().tolist()


def follow(job, course, ended):
    """Note the bytes that have come, as a dashboard of the job would ask for its figures."""
    while True:
        course.append((time.time(), job.statistics().payload_bytes))
        if ended.wait(COURSE_S):
            course.append((time.time(), job.statistics().payload_bytes))
            return


def pytorch_step():
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 6)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def step(features, labels):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(features), labels).backward()
        optimizer.step()

    return step


def tensorflow_step():
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    network = keras.Sequential(
        [
            layers.Permute((2, 3, 1)),
            layers.Conv2D(8, 8, strides=8, activation="relu"),
            layers.Flatten(),
            layers.Dense(6),
        ]
    )
    network.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return network.train_on_batch


class Costs:
    """Processor seconds of calls, the outermost of each thread alone.

    Attributes:
        seconds: of all calls so far, by the class that was called.
    """

    def __init__(self):
        self.seconds = {}
        self._lock = threading.Lock()
        self._here = threading.local()

    def count_all(self):
        """Count what a job's statistics, tuning and control do."""
        from frostline.control.follower import ControlFollower
        from frostline.control.reporter import ControlReporter
        from frostline.jobs.router import PlanFollower
        from frostline.jobs.statistics import StatisticsCollector
        from frostline.jobs.usage import UsageMeter
        from frostline.prefetch.driver import Tuner

        for kind, names in (
            (StatisticsCollector, ("__call__", "take_batch", "statistics")),
            (UsageMeter, ("__call__", "usage")),
            (PlanFollower, ("__call__",)),
            (Tuner, ("look", "record_request", "begin", "end", "limit")),
            (ControlFollower, ("wait", "count_bytes", "end_request", "wake")),
            (ControlReporter, ("begin", "report", "close")),
        ):
            for name in names:
                setattr(kind, name, self._counted(kind.__name__, getattr(kind, name)))

    def _counted(self, kind, call):
        @functools.wraps(call)
        def counted(*args, **kwargs):
            if getattr(self._here, "is_inside", False):
                return call(*args, **kwargs)
            self._here.is_inside, before_s = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._here.is_inside = False
                took_s = time.thread_time() - before_s
                with self._lock:
                    self.seconds[kind] = self.seconds.get(kind, 0.0) + took_s

        return counted


class Heard(logging.Handler):
    """What the control plane's client logs meanwhile, with its time. A context manager."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append((time.time(), record.getMessage()))

    def __enter__(self):
        logging.getLogger("frostline.control").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("frostline.control").removeHandler(self)
