"""The loaders of compare.py: each yields batches of one pass, tuned as its documentation says.

Each takes a ``Task`` and yields ``(samples, labels)``: ``float32[n, 3, side, side]`` of photographs, decoded by one
function for all, or the bytes of objects as ``uint8[n, 100000]``.
"""

import atexit
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from parts.compare_formats import BUCKET, OBJECT_BYTES, SUFFIX

BATCH = 64
# Of reads at once where a loader takes a number: as many as Frostline may have at most.
READS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One pass over data.

    Attributes:
        what: photographs or objects.
        part: warm or all.
        samples: of that part.
        side: of a photograph when it is decoded.
        workers: processes, where a loader has them.
        local: the folder with the formats, on this machine.
        scratch: an empty folder, for loaders that keep shards on disk.
        node: URL of a node beside the store.
        seed: of the order.
    """

    what: str
    part: str
    samples: int
    side: int
    workers: int
    local: str
    scratch: str
    node: str
    seed: int = 0

    def key(self, format):
        return f"{self.what}/{self.part}/{format}"

    def url(self, format):
        return f"s3://{BUCKET}/{self.key(format)}"

    def preprocess(self):
        from frostline import preprocess
        from frostline.preprocess.steps import Decode

        # At 224 pixels these photographs are decoded in full all the same.
        whole = preprocess.imagenet(self.side)
        return replace(whole, steps=(Decode(reduced=True), *whole.steps[1:]))

    @property
    def suffix(self):
        return "jpg" if self.what == "photographs" else "npy"

    def make(self):
        """From encoded bytes to what the batch is made of: picklable, and the same for all."""
        return _Decoded(self.preprocess()) if self.what == "photographs" else _as_array


class _Decoded:
    def __init__(self, preprocess):
        self._preprocess = preprocess

    def __call__(self, encoded):
        from frostline.preprocess.apply import decode_into

        out = np.empty(self._preprocess.shape, np.float32)
        decode_into(self._preprocess, encoded, out, id=0, view=None)
        return out


def _as_array(encoded):
    return np.frombuffer(encoded, np.uint8)


def endpoint():
    return os.environ["AWS_ENDPOINT_URL"]


def listed(task):
    """Names and labels of the single objects, as their store lists them."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET)
    found = [item["path"] for some in obstore.list(store, task.key("files") + "/", chunk_size=1000) for item in some]
    # Frostline's manifest lies beside them.
    return store, [(name, int(name.split("/")[-2])) for name in found if name.endswith(task.suffix)]


def shuffled(task, items):
    return [items[place] for place in np.random.default_rng(task.seed).permutation(len(items))]


def frostline(task, near=None, batch=BATCH, relist=True, format="files", shuffle=True):
    """The store's objects, decoded as they arrive; nothing is kept, since later epochs would then read nothing."""
    import frostline as fl
    from frostline.core.config import LoaderSettings

    data = fl.Dataset(task.url(format), relist=relist)
    settings = LoaderSettings(cache_bytes=0)
    with fl.offload(None, data, preprocess=task.preprocess(), near=near, settings=settings) as job:
        if task.what == "photographs":
            for found in job.loader(batch, shuffle=shuffle, seed=task.seed):
                yield found.features, found.labels
        else:
            for found in job.arrays(batch, shuffle=shuffle, seed=task.seed, encoded=True):
                yield _joined(found.features), found.labels


def frostline_unlisted(task):
    """The same with the manifest that was built last, as others take their index, and not listed again."""
    yield from frostline(task, relist=False)


def frostline_blocks(task):
    """The same of the shards that others read whole: blocks of neighbours by one request each, mixed as theirs are."""
    import frostline as fl

    yield from frostline(task, relist=False, format="shards", shuffle=fl.BlockShuffle())


def frostline_node(task):
    """The same through a node beside the store, which sends what it reads."""
    yield from frostline(task, near=task.node)


def _joined(encoded):
    """Objects of one size as one tensor."""
    import torch

    return torch.from_numpy(np.stack([_as_array(item) for item in encoded]))


def torch_files(task):
    """PyTorch's DataLoader over files of this machine, with no link at all."""
    from torch.utils.data import DataLoader, Dataset

    make, paths = task.make(), sorted(Path(task.local, task.key("files")).glob("*/*"))

    class Files(Dataset):
        def __len__(self):
            return len(paths)

        def __getitem__(self, place):
            return make(paths[place].read_bytes()), int(paths[place].parent.name)

    yield from DataLoader(Files(), BATCH, shuffle=True, num_workers=task.workers)


def decoding_alone(task):
    """What the core makes where it does nothing else: of samples in memory, one after another, put into batches."""
    make = task.make()
    paths = shuffled(task, sorted(Path(task.local, task.key("files")).glob("*/*")))
    samples = [(path.read_bytes(), int(path.parent.name)) for path in paths]
    for start in range(0, len(samples) - BATCH + 1, BATCH):
        encoded, labels = zip(*samples[start : start + BATCH], strict=True)
        yield np.stack([make(item) for item in encoded]), np.array(labels)


def torch_s3(task, batch=BATCH):
    """PyTorch's DataLoader over s3torchconnector's map-style data set."""
    from s3torchconnector import S3ClientConfig, S3MapDataset
    from torch.utils.data import DataLoader

    make = task.make()
    data = S3MapDataset.from_objects(
        [f"s3://{BUCKET}/{name}" for name, _ in listed(task)[1]],
        region="us-east-1",
        endpoint=endpoint(),
        transform=lambda found: (make(found.read()), int(found.key.split("/")[-2])),
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    yield from DataLoader(data, batch, shuffle=True, num_workers=task.workers)


def litdata(task):
    """LitData over chunks that it made, its cache empty."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    # Without it the way by obstore, which is its fastest, takes no store that speaks plain HTTP.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001
    make = task.make()
    secret = {"aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"]}
    secret["aws_secret_access_key"] = os.environ["AWS_SECRET_ACCESS_KEY"]
    data = StreamingDataset(
        task.url("litdata"),
        cache_dir=task.scratch,
        shuffle=True,
        drop_last=False,
        storage_options={"endpoint_url": endpoint(), "region_name": "us-east-1", **secret},
        transform=lambda found: (make(found["image"]), found["label"]),
    )
    yield from StreamingDataLoader(data, batch_size=BATCH, num_workers=task.workers)


def mosaic(task):
    """MosaicML Streaming over shards that it made, its folder empty.

    A second data set in one process takes the first one's shared memory for its own and fails, so that the warm-up
    does no more than to import it.
    """
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    if task.part == "warm":
        yield [0], [0]
        return
    clean_stale_shared_memory()
    make = task.make()

    class Photographs(StreamingDataset):
        def __getitem__(self, place):
            found = super().__getitem__(place)
            return make(found["image"]), found["label"]

    data = Photographs(remote=task.url("mds"), local=task.scratch, batch_size=BATCH, shuffle=True)
    for stream in data.streams:
        # The client that read the index has a connection open. Forked workers would all use it, and take the answers of
        # one another: over a short link a shard then holds another one's bytes.
        stream._downloader.clean_up()  # noqa: SLF001
    yield from DataLoader(data, BATCH, num_workers=task.workers)


def webdataset(task):
    """WebDataset over shards that curl reads; samples are batched in the workers."""
    import datetime

    import obstore
    import webdataset as wds
    from obstore.store import S3Store

    store = S3Store(BUCKET)
    names = [item["path"] for some in obstore.list(store, task.key("shards") + "/") for item in some]
    names = [name for name in names if name.endswith(".tar")]  # Frostline's manifest lies beside them
    signed = obstore.sign(store, "GET", names, datetime.timedelta(hours=1))
    data = (
        wds.WebDataset([f"pipe:curl -s -f '{url}'" for url in signed], shardshuffle=len(names), empty_check=False)
        .shuffle(1000)
        .to_tuple(SUFFIX[task.what], "cls")
        .map_tuple(task.make(), int)
        .batched(BATCH)
    )
    yield from wds.WebLoader(data, num_workers=task.workers, batch_size=None)


def spdl(task):
    """SPDL's pipeline: reads in threads, decoding in a thread a core, batches."""
    import obstore
    import torch
    from spdl.pipeline import PipelineBuilder

    store, items = listed(task)
    make = task.make()
    cores = len(os.sched_getaffinity(0))

    def read(item):
        return memoryview(obstore.get(store, item[0]).bytes()), item[1]

    def decode(found):
        return make(found[0]), found[1]

    def collate(found):
        pixels, labels = zip(*found, strict=True)
        return torch.from_numpy(np.stack(pixels)), torch.tensor(labels)

    pipeline = (
        PipelineBuilder()
        .add_source(shuffled(task, items))
        .pipe(read, concurrency=READS, executor=ThreadPoolExecutor(READS))
        .pipe(decode, concurrency=cores, executor=ThreadPoolExecutor(cores))
        .aggregate(BATCH)
        .pipe(collate)
        .add_sink(4)
        .build(num_threads=2)
    )
    with pipeline.auto_stop():
        yield from pipeline


def ray_data(task):
    """Ray Data: binary files read in tasks, decoded in those that follow."""
    import ray
    from pyarrow.fs import S3FileSystem

    if not ray.is_initialized():  # by the warm-up; a cluster is there before a pass begins
        cores = len(os.sched_getaffinity(0))
        ray.init(address="local", num_cpus=cores, include_dashboard=False, object_store_memory=1 << 30)
        atexit.register(ray.shutdown)
    ray.data.DataContext.get_current().enable_progress_bars = False
    make = task.make()
    files = S3FileSystem(endpoint_override=endpoint().removeprefix("http://"), scheme="http", region="us-east-1")

    def decode(row):
        return {"image": make(row["bytes"]), "label": int(row["path"].split("/")[-2])}

    data = ray.data.read_binary_files(
        f"{BUCKET}/{task.key('files')}/",
        filesystem=files,
        include_paths=True,
        file_extensions=[task.suffix],
        shuffle="files",
        override_num_blocks=max(1, task.samples // BATCH),
        num_cpus=1 / task.workers,
    ).map(decode, num_cpus=1 / task.workers)
    for batch in data.iter_torch_batches(batch_size=BATCH, prefetch_batches=4):
        yield batch["image"], batch["label"]


def tf_data(task, batch=BATCH, reads=READS):
    """tf.data, whose own files are not in S3: reads by obstore and decoding are functions that it maps."""
    import obstore
    import tensorflow as tf

    store, items = listed(task)
    make = task.make()
    names, labels = zip(*shuffled(task, items), strict=True)
    kind, shape = (tf.float32, task.preprocess().shape) if task.what == "photographs" else (tf.uint8, (OBJECT_BYTES,))

    def read(name):
        return bytes(obstore.get(store, name.decode()).bytes())

    def decoded(encoded):
        found = tf.numpy_function(make, [encoded], kind)
        return tf.ensure_shape(found, shape)

    data = (
        tf.data.Dataset.from_tensor_slices((list(names), list(labels)))
        .map(lambda name, label: (tf.numpy_function(read, [name], tf.string), label), num_parallel_calls=reads)
        .map(lambda encoded, label: (decoded(encoded), label), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )
    if reads == READS:
        # By default there are as many threads as cores, and each of these calls holds one while it waits.
        options = tf.data.Options()
        options.threading.private_threadpool_size = READS
        data = data.with_options(options)
    yield from data


LOADERS = {
    "Frostline": frostline,
    "Frostline, not listed again": frostline_unlisted,
    "Frostline, shards in blocks": frostline_blocks,
    "Frostline, node beside the store": frostline_node,
    "DataLoader, s3torchconnector": torch_s3,
    "SPDL": spdl,
    "LitData": litdata,
    "MosaicML Streaming": mosaic,
    "WebDataset": webdataset,
    "Ray Data": ray_data,
    "tf.data": tf_data,
    "DataLoader, local files": torch_files,
    "decoding alone": decoding_alone,
}
