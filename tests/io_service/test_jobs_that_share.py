"""Whole jobs through an I/O service: the same rows and losses, read once, also when it is killed."""

import json
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from torch.nn import functional

import frostline as fl
from frostline.core.config import IoSettings
from frostline.core.errors import NodeUnreachable
from frostline.io_service.handler import Upstream
from frostline.io_service.start import start_io
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import stop, until
from support.services import python


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=16)


@pytest.fixture(scope="module")
def node(shared_node):
    return shared_node


@pytest.fixture(scope="module")
def service(node):
    with start_io(Upstream(near=(node.url,)), IoSettings(memory_bytes=64 << 20)) as service:
        yield service


def read_bytes(service):
    with closing(service.transport()) as way:
        return way.node_statistics()["totals"]["bytes_read"]


def losses(folder, near, **options):
    torch.manual_seed(0)
    model = fl.freeze(Small().eval(), until="stem")
    data = fl.Dataset(str(folder))
    with fl.offload(model, data, preprocess=tiny_preprocess(), near=near, **options) as job:
        optimiser = torch.optim.SGD(job.head.parameters(), lr=0.05)
        found = []
        for batches in job.epochs(8, range(2), shuffle=True, seed=3):
            for batch in batches:
                loss = functional.cross_entropy(job.head(batch.features), batch.labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                found.append(loss.item())
        return found


@pytest.mark.parametrize("options", [{"cut": 0}, {"cut": 1}, {"cut": 2}, {}])
def test_losses_are_the_same_bits_with_a_service_and_without(folder, node, service, options):
    assert losses(folder, service.url, **options) == losses(folder, node.url, **options)


JOB = """
    import json, os, sys
    import numpy as np
    import frostline as fl
    from support.images import tiny_preprocess
    folder, near, seed = sys.argv[1:]
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), near=near, cut=1) as job:
        print("ready", flush=True)
        sys.stdin.readline()
        rows = {}
        for batch in job.arrays(8, shuffle=True, seed=int(seed)):
            for id, row in zip(batch.ids.tolist(), batch.features):
                rows[id] = float(np.abs(row).sum())
    print(json.dumps(sorted(rows.items())), flush=True)
"""


def test_what_two_processes_read_in_other_orders_is_decoded_once(folder, node):
    with start_io(Upstream(near=(node.url,)), IoSettings(memory_bytes=64 << 20)) as service:
        before = read_bytes(service)
        with python(JOB, folder, service.url, 1) as one, python(JOB, folder, service.url, 2) as other:
            for job in (one, other):
                assert job.stdout.readline() == "ready\n", job.stderr.read()
            for job in (one, other):
                job.stdin.write("go\n")
                job.stdin.flush()
            first, second = (json.loads(job.stdout.readline()) for job in (one, other))
        assert first == second
        assert len(first) == 48
        assert read_bytes(service) - before == sum(path.stat().st_size for path in folder.rglob("*.jpg"))
        with closing(service.transport()) as way:
            until(lambda: way.service_statistics()["window"]["used_bytes"] == 0)
            until(lambda: len(way.service_statistics()["jobs"]) == 1)


def test_a_job_goes_on_after_its_service_was_killed_and_started_again(folder, node):
    with start_io(Upstream(near=(node.url,)), IoSettings(memory_bytes=64 << 20)) as service:
        data = fl.Dataset(str(folder))
        settings = fl.LoaderSettings(requests_in_flight=1, samples_per_request=8, cache_bytes=0)
        with fl.offload(None, data, preprocess=tiny_preprocess(), near=service.url, cut=1, settings=settings) as job:
            ids = []
            again = threading.Thread(target=service.start)
            for number, batch in enumerate(job.loader(8, shuffle=True, seed=1)):
                ids += batch.ids.tolist()
                if number == 1:
                    os.kill(service.pid, signal.SIGKILL)
                    until(lambda: service.pid == 0)
                    again.start()
            again.join()  # who ends the service must know it
            assert sorted(ids) == sorted(data.samples.ids.tolist())


def test_a_service_names_its_only_node_within_seconds_where_that_one_hangs(node, caplog):
    caplog.set_level(logging.INFO, "frostline.io")
    with Upstream(near=(node.url,)).connect() as upstream, ThreadPoolExecutor(1) as pool:
        try:
            stop(node.pid)
            asked = pool.submit(upstream.health)
            until(lambda: f"{node.url} is waited for: " in caplog.text, 15)
        finally:
            os.kill(node.pid, signal.SIGCONT)
        assert asked.result(60).roots
        until(lambda: f"{node.url} answers again" in caplog.text)


def test_ends_with_one_sentence_where_the_io_service_stays_away(folder, node):
    with start_io(Upstream(near=(node.url,)), IoSettings(memory_bytes=64 << 20)) as service:
        settings = fl.LoaderSettings(requests_in_flight=1, samples_per_request=8, cache_bytes=0, retry_for_s=0.3)
        data = fl.Dataset(str(folder))
        with fl.offload(None, data, preprocess=tiny_preprocess(), near=service.url, settings=settings) as job:
            batches = iter(job.loader(8))
            next(batches)
            os.kill(service.pid, signal.SIGKILL)
            until(lambda: service.pid == 0)
            with pytest.raises(NodeUnreachable, match="start one with frostline io"):
                list(batches)


def test_a_job_without_a_node_takes_the_service_that_its_settings_name(folder, service):
    settings = fl.LoaderSettings(io=service.url)
    with fl.offload(None, fl.Dataset(str(folder)), preprocess=tiny_preprocess(), settings=settings) as job:
        assert any(service.url in where for _, where in job.where)
        assert sum(len(batch.ids) for batch in job.loader(16)) == 48
        assert np.isfinite(job.stages()["store: read"])
