"""The cache of features: which embedded store keeps it, what it saves, and what is left of it after kill -9.

    python benchmarks/feature_cache.py --data DIR [--parts stores,epochs,links,shared,writers,nodes] [--kills 100]
        [--node-kills 100]

``stores`` writes and reads rows of 5 kB and of 200 kB with Frostline's own cache (SQLite) and, where their packages are
installed (pip install lmdb rocksdict), with LMDB and RocksDB used the same way: batches of 32, each value's CRC-32 kept
and checked. Reads are from the page cache, which is what an epoch after the first one does. Rates are by seconds of
processor time, all threads together, so that they hold on a busy machine too.

``epochs`` runs a node with a cache and a trainer in two network namespaces with a shaped link between them, a core
each: the first epoch computes, the second one comes from the node's cache, the third from the trainer's memory, and a
second job's first one from the trainer's disk. Counts what the node read, decoded and computed each time. Needs root.

``links`` has the trainer, which keeps nothing, read features of 5 kB and activations of 63 kB from the node's cache,
over links of several rates: up to where is the link the limit, and from where the two processors? Needs root.

``shared`` has one node compute features and write them to a cache that nodes share, in a folder and in a real S3 server
(SeaweedFS, on the same cores), and another node, whose own disk is empty, read them there: an epoch of each, beside one
without any cache. Counts what each node computed, read and wrote, and in how many objects.

``writers`` kills a process that writes to a cache, again and again at random moments, and reads everything back.
``nodes`` kills a node with a cache again and again while a job trains; its losses must be those of an undisturbed run.

Writes JSON with --out FILE.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

from links import STORE, STORE_ADDRESS, TRAINER, Inside, ShapedLink, received_bytes

TESTS = Path(__file__).parents[1] / "tests"
ROWS = 32
PIXELS = 1


def main():
    wanted = arguments()
    if wanted.inside:
        {"node": node_inside, "trainer": trainer_inside, "reader": reader_inside}[wanted.inside](wanted)
        return
    parts = {
        "stores": stores,
        "epochs": epochs,
        "links": links,
        "shared": shared,
        "writers": killed_writers,
        "nodes": killed_nodes,
    }
    from frostline.engines.machine import hardware_name

    found = {"hardware": hardware_name("cpu")}
    found |= {name: parts[name](wanted) for name in wanted.parts.split(",")}
    found["load"] = os.getloadavg()[0]
    print(json.dumps(found, indent=1))
    if wanted.out:
        known = json.loads(wanted.out.read_text()) if wanted.out.exists() else {}
        wanted.out.write_text(json.dumps({**known, **found}, indent=1) + "\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--parts", default="stores,epochs,links,shared,writers,nodes")
    parser.add_argument("--mbit", default="100,1000")
    parser.add_argument("--what", default="features,activations", help="of part links")
    parser.add_argument("--request-rows", type=int, default=32, help="samples_per_request of part links")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100, help="of a writer")
    parser.add_argument("--node-kills", type=int, default=100, help="of a node while a job trains")
    parser.add_argument("--node-kills-s", type=float, default=3600, help="no further one after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", choices=("node", "trainer", "reader"), help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    return parser.parse_args()


# stores


class Ours:
    name = "SQLite"

    def __init__(self, folder, row_bytes):
        from frostline.cache import FeatureStore, RowLayout

        self._store = FeatureStore(Path(folder), 1 << 30)
        self._layout = RowLayout(shapes=((row_bytes,),), dtypes=("uint8",))
        self._scope = bytes(32)

    def put(self, keys, rows):
        assert self._store.put(self._scope, keys, (rows,)) == len(keys)

    def get(self, keys, out):
        assert self._store.get_into(self._scope, keys, self._layout, (out,)).all()

    def close(self):
        self._store.close()


class Lmdb:
    name = "LMDB"

    def __init__(self, folder, row_bytes):
        import lmdb

        self._store = lmdb.open(folder, map_size=1 << 30, sync=False, metasync=False)

    def put(self, keys, rows):
        with self._store.begin(write=True) as writing:
            writing.cursor().putmulti([(key, sealed(row)) for key, row in zip(keys, rows, strict=True)])

    def get(self, keys, out):
        with self._store.begin(buffers=True) as reading:
            for place, (_, value) in enumerate(reading.cursor().getmulti(keys)):
                out[place] = opened(value)

    def close(self):
        self._store.close()


class RocksDb:
    name = "RocksDB"

    def __init__(self, folder, row_bytes):
        from rocksdict import Options, Rdict

        self._store = Rdict(folder, options=Options(raw_mode=True))

    def put(self, keys, rows):
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, row in zip(keys, rows, strict=True):
            batch.put(key, sealed(row))
        self._store.write(batch)

    def get(self, keys, out):
        for place, value in enumerate(self._store[keys]):
            out[place] = opened(value)

    def close(self):
        self._store.close()


def sealed(row):
    return zlib.crc32(row).to_bytes(4, "little") + row.tobytes()


def opened(value):
    import numpy as np

    view = memoryview(value)
    assert zlib.crc32(view[4:]) == int.from_bytes(view[:4], "little")
    return np.frombuffer(view, np.uint8, offset=4)


def stores(wanted):
    import numpy as np

    found = []
    for row_bytes, count in ((5120, 16_384), (200_704, 1024)):
        rows = np.random.default_rng(0).integers(0, 256, (count, row_bytes), np.uint8)
        keys = [os.urandom(16) for _ in range(count)]
        for kind in (Ours, Lmdb, RocksDb):
            runs = [one_store(kind, keys, rows) for _ in range(wanted.rounds)]
            if None in runs:
                print(f"{kind.name}: its package is not installed")
                continue
            median = [statistics.median(column) for column in zip(*runs, strict=True)]
            spread = [(min(column), max(column)) for column in zip(*runs, strict=True)]
            one = {"store": kind.name, "row_bytes": row_bytes, "rows": count}
            for figure, value, bounds in zip(
                ("put_MB_per_cpu_s", "get_MB_per_cpu_s", "MB_on_disk"), median, spread, strict=True
            ):
                one[figure], one[f"{figure}_spread"] = round(value), [round(bound) for bound in bounds]
            found.append(one)
            print(one, flush=True)
    return found


def one_store(kind, keys, rows):
    import numpy as np

    order = np.random.default_rng(1).permutation(len(keys))
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = kind(folder, rows.shape[1])
        except ImportError:
            return None
        started = time.process_time()
        for start in range(0, len(keys), ROWS):
            store.put(keys[start : start + ROWS], rows[start : start + ROWS])
        put_s = time.process_time() - started
        out = np.empty((ROWS, rows.shape[1]), np.uint8)
        started = time.process_time()
        for start in range(0, len(keys), ROWS):
            some = order[start : start + ROWS]
            store.get([keys[place] for place in some], out)
        get_s = time.process_time() - started
        store.close()
        on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return rows.nbytes / put_s / 1e6, rows.nbytes / get_s / 1e6, on_disk / 1e6


# epochs


def epochs(wanted):
    found = []
    with tempfile.TemporaryDirectory() as folder, ShapedLink() as link:
        options = ["--data", wanted.data, "--samples", str(wanted.samples)]
        inside = [*options, "--cache", f"{folder}/node", "--inside", "node"]
        with Inside(STORE, 0, __file__, *inside) as node:
            url = node.answer()["url"]
            for mbit in (int(word) for word in wanted.mbit.split(",")):
                link.rate(mbit)
                for what, samples in (("features", wanted.samples), ("pixels", wanted.samples // 8)):
                    kept = f"{folder}/{mbit}-{what}"
                    options = ["--data", wanted.data, "--cache", kept, "--inside", "trainer"]
                    for job in (1, 2):
                        with Inside(TRAINER, 1, __file__, *options) as trainer:
                            for item in trainer.ask(url=url, what=what, samples=samples, job=job):
                                row = {"mbit": mbit, "what": what, "job": job, **item}
                                row["share_of_link"] = round(row["bytes"] * 8 / row["seconds"] / mbit / 1e6, 3)
                                found.append(row)
                                print(row, flush=True)
    return found


UNTIL = {"features": "features", "activations": "_blocks.7", "pixels": None}
RATES = {"features": (50, 100, 200, 300, 400, 600, 1000), "activations": (300, 600, 1000)}
# A connection takes its time to find out how fast a link is.
EPOCHS = {"features": 8, "activations": 1}


def links(wanted):
    """Medians of the rounds."""
    found = []
    with tempfile.TemporaryDirectory() as folder, ShapedLink() as link:
        options = ["--data", wanted.data]
        with Inside(STORE, 0, __file__, *options, "--cache", f"{folder}/node", "--inside", "node") as node:
            url = node.answer()["url"]
            for what in wanted.what.split(","):
                link.rate(2000)
                options = ["--data", wanted.data, "--samples", str(wanted.samples), "--inside", "reader"]
                options += ["--request-rows", str(wanted.request_rows)]
                with Inside(TRAINER, 1, __file__, *options) as reader:
                    reader.ask(url=url, what=what, epochs=1)  # computes
                    for mbit in RATES[what]:
                        link.rate(mbit)
                        rounds = [reader.ask(epochs=EPOCHS[what]) for _ in range(wanted.rounds)]
                        assert not any(item["node"]["compute_s"] for item in rounds)
                        shares = [item["bytes"] * 8 / item["seconds"] / mbit / 1e6 for item in rounds]
                        row = {
                            "what": what,
                            "request_rows": wanted.request_rows,
                            "mbit": mbit,
                            "samples_per_s": statistics.median(item["samples_per_s"] for item in rounds),
                            "share_of_link": round(statistics.median(shares), 3),
                            "shares": [round(share, 3) for share in shares],
                        }
                        found.append(row)
                        print(row, flush=True)
    return found


def reader_inside(wanted):
    import numpy as np

    import frostline as fl
    from frostline.core.config import LoaderSettings
    from frostline.training.networks import load_model

    question = json.loads(sys.stdin.readline())
    network = load_model("demo:efficientnet_lite0", classes=6)
    model = fl.freeze(network.model.eval(), until=UNTIL[question["what"]])
    whole = fl.Dataset(wanted.data)
    data = whole.take(np.arange(min(wanted.samples, len(whole))))
    settings = LoaderSettings(cache_bytes=0, follow=False, samples_per_request=wanted.request_rows)
    with job_of(fl, model, data, network, question, settings) as job:
        while question:
            print(json.dumps(epoch(job, "the node's cache", question["epochs"])), flush=True)
            question = json.loads(sys.stdin.readline() or "null")


def node_inside(wanted):
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    settings = NodeSettings(cache_folder=wanted.cache, cache_bytes=4 << 30, allow_anonymous=True)
    with start_node((str(Path(wanted.data).resolve()),), settings, host=STORE_ADDRESS) as node:
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


COUNTED = ("samples", "cache_hits", "bytes_read", "read_s", "decode_s", "compute_s")


def trainer_inside(wanted):
    import numpy as np

    import frostline as fl
    from frostline.core.config import LoaderSettings
    from frostline.training.networks import load_model

    question = json.loads(sys.stdin.readline())
    network = load_model("demo:efficientnet_lite0", classes=6)
    until = UNTIL[question["what"]]
    model = None if until is None else fl.freeze(network.model.eval(), until=until)
    whole = fl.Dataset(wanted.data)
    data = whole.take(np.arange(question["samples"]) % len(whole))
    with tempfile.TemporaryDirectory() as scratch:
        settings = LoaderSettings(cache_folder=wanted.cache or scratch, requests_in_flight=8, follow=False)
        alone = LoaderSettings(cache_bytes=0, requests_in_flight=8, follow=False)
        answers = []
        if question["job"] == 1:
            with job_of(fl, model, data, network, question, alone) as job:  # keeps nothing at the trainer
                answers += [epoch(job, "computed or found"), epoch(job, "the node's cache")]
        with job_of(fl, model, data, network, question, settings) as job:
            answers += [epoch(job, "first of a job with a cache"), epoch(job, "the trainer's memory")]
    print(json.dumps(answers), flush=True)


def job_of(fl, model, data, network, question, settings):
    from frostline.core import Route

    job = fl.offload(model, data, preprocess=network.preprocess, near=question["url"], settings=settings)
    job.use({Route(PIXELS if model is None else job.frost_line.number): 1.0})
    return job


def epoch(job, source, epochs=1):
    transport = job._fetcher.transport  # noqa: SLF001 (the figures of the node beside those of the job)
    before, link, started = transport.node_statistics()["totals"], received_bytes(), time.perf_counter()
    payload = samples = 0
    for number in range(epochs):
        for batch in job.loader(64, shuffle=True, seed=0, epoch=number):
            payload += batch.features.nbytes
            samples += len(batch)
    seconds, received = time.perf_counter() - started, received_bytes() - link
    after = transport.node_statistics()["totals"]
    return {
        "source": source,
        "seconds": round(seconds, 4),
        "payload_MB_per_s": round(payload / seconds / 1e6, 1),
        "samples_per_s": round(samples / seconds),
        "bytes": received,
        "node": {name: round(after[name] - before[name], 2) for name in COUNTED},
    }


# shared


def shared(wanted):
    sys.path.insert(0, str(TESTS))
    from support.seaweed import seaweed

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for what in ("features", "pixels"):
            found.append({"what": what, "where": "no cache", **shared_epochs(wanted, what, None, f"{folder}/none")[0]})
            print(found[-1], flush=True)
            Path(folder, what).mkdir()
            rows = shared_epochs(wanted, what, Path(folder, what).as_uri(), f"{folder}/disk-{what}-folder")
            found += [{"what": what, "where": "folder", **row} for row in rows]
            Path(folder, f"weed-{what}").mkdir()
            with seaweed(Path(folder, f"weed-{what}")) as server:
                os.environ.update(server.environment())
                server.make_bucket("features")
                rows = shared_epochs(wanted, what, "s3://features/here", f"{folder}/disk-{what}-s3")
            found += [{"what": what, "where": "S3", **row} for row in rows]
            for item in found[-4:]:
                print(item, flush=True)
    return found


def shared_epochs(wanted, what, url, disk):
    """An epoch of a first node, and two of a second one with a disk of its own."""
    import numpy as np

    import frostline as fl
    from frostline.core.config import LoaderSettings, NodeSettings
    from frostline.node.process import start_node
    from frostline.training.networks import load_model

    network = load_model("demo:efficientnet_lite0", classes=6)
    whole = fl.Dataset(wanted.data)
    data = whole.take(np.arange(wanted.samples) % len(whole))
    model = fl.freeze(network.model.eval(), until="features") if what == "features" else None
    keeps_nothing = LoaderSettings(cache_bytes=0, requests_in_flight=8, follow=False)
    rows = []
    nodes = [("first", None, 1)] if url is None else [("first", None, 1), ("second", disk, 2)]
    for name, own, epochs in nodes:
        settings = NodeSettings(cache_folder=own, shared_cache=url)
        with (
            start_node((str(Path(wanted.data).resolve()),), settings) as node,
            job_of(fl, model, data, network, {"url": node.url}, keeps_nothing) as job,
        ):
            transport = job._fetcher.transport  # noqa: SLF001 (the figures of the node beside those of the job)
            for number in range(epochs):
                before, started = transport.node_statistics(), time.perf_counter()
                for _ in job.loader(64, shuffle=True, seed=number, epoch=number):
                    pass
                seconds = time.perf_counter() - started
                after = transport.node_statistics()
                node_did = {key: round(after["totals"][key] - before["totals"][key], 2) for key in COUNTED}
                row = {"node": name, "epoch": number + 1, "seconds": round(seconds, 3), "did": node_did}
                row["samples_per_s"] = round(wanted.samples / seconds)
                rows.append(row | {"shared": after["shared_cache"]})
    return rows


# kills


def killed_writers(wanted):
    """Each round: a writer is killed, the cache opens again, every row it reported is there, and none is wrong."""
    sys.path.insert(0, str(TESTS))
    from frostline.cache import FeatureStore
    from support import stored

    draw, done, budget = random.Random(wanted.seed), 0, 1 << 30
    found = {"kills": 0, "rows_reported": 0, "rows_checked": 0, "lost": 0, "damaged": 0, "resets": 0}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(wanted.kills):
            with stored.writing(folder, budget, done) as writer:
                stop = done
                for _ in range(draw.randrange(1, 60)):
                    stop = int(writer.stdout.readline())
                for _ in range(draw.randrange(50_000)):  # wherever it is by then
                    pass
                writer.send_signal(signal.SIGKILL)
                for line in writer.stdout:
                    stop = int(line) if line.endswith("\n") else stop
            with FeatureStore(Path(folder), budget) as store:
                numbers = range(max(0, done - 800), stop + 10 * stored.ROWS)  # this round's, and some from before
                there = stored.checked(store, numbers)  # asserts that each row is right to the last bit
                statistics_ = store.statistics()
            found["kills"] += 1
            found["rows_checked"] += len(there)
            found["lost"] += len(set(range(numbers[0], stop)) - set(there))
            found["damaged"] += statistics_.damaged
            found["resets"] += statistics_.resets
            done = stop
        found["rows_reported"] = done
    print(found, flush=True)
    return found


def killed_nodes(wanted):
    """One job trains on while its node, which keeps features, is killed at random moments and started again.

    Its random views come again every third epoch, so that nodes find what those killed before them had written.
    """
    import frostline as fl
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    data = fl.Dataset(wanted.data)
    data = data.take(np_rows(len(data), 64))
    root = (str(Path(wanted.data).resolve()),)
    with tempfile.TemporaryDirectory() as folder:
        settings = NodeSettings(cache_folder=folder, cache_bytes=1 << 30, device_batch=8)
        with start_node(root, settings) as node, Killer(node, wanted) as killer:
            disturbed, cache = losses(fl, data, node, killer.goes_on)
        files = len(list(Path(folder).glob("*.sqlite")))
    with start_node(root, NodeSettings(device_batch=8)) as node:
        undisturbed, _ = losses(fl, data, node, lambda epoch: len(disturbed) > epoch)
    found = {
        "kills": killer.kills,
        "epochs": len(disturbed),
        "steps": sum(map(len, disturbed)),
        "same_losses": disturbed == undisturbed,
        "files": files,
        "cache": cache,
    }
    print(found, flush=True)
    return found


class Killer:
    """Kills a node at random moments until it has done so often enough; whoever needs it starts it again."""

    def __init__(self, node, wanted):
        self._node = node
        self._wanted = wanted.node_kills
        self._until = time.monotonic() + wanted.node_kills_s
        self._draw = random.Random(wanted.seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.kills = 0

    def goes_on(self, epoch):
        """Whether it is not done; it begins when a job begins with its first epoch."""
        if epoch == 0:
            self._thread.start()
        return self._thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()

    def _run(self):
        while self.kills < self._wanted and not self._stopping.wait(self._draw.random() * 4):
            if time.monotonic() > self._until:
                return
            pid = self._node.pid
            if pid:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
                print(f"kill {self.kills}", file=sys.stderr, flush=True)
            while self._node.pid in (0, pid) and not self._stopping.wait(0.05):
                pass


def np_rows(size, count):
    import numpy as np

    return np.sort(np.random.default_rng(0).permutation(size)[:count])


def losses(fl, data, node, goes_on):
    """Losses of each epoch of a head on features that are asked for each time: the trainer keeps none."""
    import torch

    from frostline.core import Route
    from frostline.core.config import LoaderSettings
    from frostline.core.errors import FrostlineError
    from frostline.core.events import RequestRetried
    from frostline.preprocess import Decode, Normalize, Preprocess, RandomHorizontalFlip, RandomResizedCrop
    from frostline.training.networks import load_model

    torch.manual_seed(0)
    normalise = Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
    steps = (Decode(), RandomResizedCrop(64), RandomHorizontalFlip(), normalise)
    preprocess = Preprocess(steps=steps)
    model = load_model("demo:efficientnet_lite0", classes=len(data.classes)).model
    model = fl.freeze(model, until="features", input_shape=preprocess.shape)
    settings = LoaderSettings(
        cache_bytes=0,
        views=3,
        samples_per_request=8,
        requests_in_flight=2,
        device_batch=8,
        follow=False,
        retry_for_s=300,
    )

    def observe(event):
        if isinstance(event, RequestRetried):
            node.restart_if_dead()

    found, hits, last = [], 0, 0
    with fl.offload(model, data, preprocess=preprocess, near=node.url, settings=settings, observe=observe) as job:
        job.use({Route(job.frost_line.number): 1.0})
        optimizer = torch.optim.SGD((parameter for parameter in job.head.parameters() if parameter.requires_grad), 0.05)
        while goes_on(len(found)):
            found.append([])
            for batch in job.loader(16, shuffle=True, seed=0, epoch=len(found)):
                loss = torch.nn.functional.cross_entropy(job.head(batch.features), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found[-1].append(loss.item())
            with suppress(FrostlineError):  # it may just have been killed: what it found since is not counted
                totals = job._fetcher.transport.node_statistics()["totals"]  # noqa: SLF001
                hits += totals["cache_hits"] - (last if totals["cache_hits"] >= last else 0)
                last = totals["cache_hits"]
        cache = job._fetcher.transport.node_statistics()["cache"]  # noqa: SLF001
        return found, {"hits_counted_at_least": hits, "last_node": cache}


if __name__ == "__main__":
    main()
