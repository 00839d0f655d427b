"""A real node process stays within its memory budget under deliberate overload."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import FrostlineError
from frostline.node.process import start_node
from support.nodes import artifact_of, jpeg, make_images, request, samples_of, small_network, until

BUDGET = 400 << 20
SIDE = 224
PACKED = ((1, "zstd"), (2, "fp16"), (3, "int8+sparse+lz4"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = make_images(tmp_path_factory.mktemp("images") / "here", 24, size=(400, 300))
    for name, size in (("large", (2400, 1800)), ("larger", (4000, 3000))):
        (folder / f"{name}.jpg").write_bytes(jpeg(0, size))
    (folder / "huge.bin").write_bytes(b"\0")
    with (folder / "huge.bin").open("r+b") as file:
        file.truncate(3 << 30)
    return folder


def memory_of(pid, field):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def asked(transport, message):
    """Read an answer, however it ends."""
    with suppress(FrostlineError):
        for batch in transport.features(message):
            del batch


def stalled(url, message):
    """A connection that asks and never reads."""
    host, port = url.removeprefix("http://").split(":")
    peer = socket.create_connection((host, int(port)))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps(message.to_json()).encode()
    peer.sendall(f"POST /v1/features HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return peer


def load(images, digest, last):
    """Requests that want too much: many samples at early cuts, large images, lengths that lie."""
    samples = samples_of(images)
    many = samples.take(np.arange(len(samples)).repeat(3))
    many.ids[:] = np.arange(len(many))
    lying = samples.take(np.arange(len(samples)))
    lying.lengths[::2] = 1 << 33
    return [
        *(request(images, cut, digest, samples=many, side=SIDE) for cut in (0, 1, 2, 3, last) for _ in range(2)),
        *(request(images, cut, digest, samples=many, side=SIDE, codec=codec) for cut, codec in PACKED),
        *(request(images, cut, digest, samples=lying, side=SIDE) for cut in (0, 1)),
        request(images, 1, samples=samples, side=4096),
    ]


def test_a_node_stays_within_its_budget_whatever_is_asked(images):
    network = small_network(side=SIDE)
    digest, body = artifact_of(network)
    last = network.cuts[-1].number
    few = samples_of(images).take(np.arange(2))
    with ExitStack() as stack:
        node = stack.enter_context(start_node((images.as_uri(),), NodeSettings(memory_bytes=BUDGET, max_requests=12)))
        transport = stack.enter_context(closing(HttpTransport(node.url, LoaderSettings())))
        tiny = artifact_of(small_network())
        transport.put_prefix(*tiny)
        for cut in (0, 1, last):  # what the runtime takes once; a few kilobytes of work
            asked(transport, request(images, cut, tiny[0], samples=few))
        baseline = memory_of(node.pid, "VmRSS")
        Path(f"/proc/{node.pid}/clear_refs").write_text("5")  # VmHWM starts anew

        transport.put_prefix(digest, body)
        for width in (900, 901):
            transport.put_prefix(*artifact_of(small_network(width=width)))
        messages = load(images, digest, last)
        with ThreadPoolExecutor(10) as threads:
            with stalled(node.url, messages[0]), stalled(node.url, messages[2]):
                list(threads.map(partial(uploaded, transport), (40 << 20, 60 << 20, 120 << 20)))
                transport.put_prefix(digest, body)  # nobody used it, so that it made room for what was announced
                list(threads.map(partial(asked, transport), messages[-5:]))
            list(threads.map(partial(asked, transport), messages))
        peak = memory_of(node.pid, "VmHWM")
        statistics = transport.node_statistics()
        until(lambda: transport.node_statistics()["requests_in_progress"] == 0)
        after = transport.node_statistics()["memory"]

    assert peak - baseline <= BUDGET, f"{(peak - baseline) >> 20} MiB"
    for name, share in statistics["memory"].items():
        minimum = {"messages": 0.2, "ahead": -1.0}.get(name, 0.6)  # else this is no load; folders are not read ahead
        assert minimum * share["total_bytes"] < share["peak_bytes"] <= share["total_bytes"], name
    assert sum(share["total_bytes"] for share in statistics["memory"].values()) <= BUDGET
    assert all(share["reserved_bytes"] == 0 for name, share in after.items() if name != "weights")
    assert statistics["totals"]["finished"] > 5
    print(f"{(peak - baseline) >> 20} MiB above the idle node's {baseline >> 20}", statistics)


def uploaded(transport, nbytes):
    with suppress(FrostlineError):
        transport.put_prefix(f"{nbytes:064x}", bytes(nbytes))
