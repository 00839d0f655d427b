"""Writes samples in every format there is, to any store; some of them broken on purpose."""

import csv
import gzip
import hashlib
import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core import Samples
from frostline.datasets.formats.base import stable_ids
from frostline.datasets.formats.ready import (
    LAYOUT,
    TABLE,
    Layout,
    MaskLocations,
    ReadyFormat,
    ReadyPart,
    masks_beside,
    object_name,
    table_file,
)
from frostline.preprocess import Applied
from frostline.stores.cql.writer import TableSample
from frostline.stores.urls import object_url
from support.images import tiny_preprocess

ENCODED = pa.struct({"bytes": pa.binary(), "path": pa.string()})
"""The type of a column of images as Hugging Face's libraries write one."""


def tar_of(files, fmt=tarfile.PAX_FORMAT):
    """A tar of named contents."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def webdataset_files(examples, *, suffix="jpg"):
    """Names and contents of the members of a shard."""
    for example in examples:
        key = f"{example.label}/{example.key}"
        yield f"{key}.{suffix}", example.data
        yield f"{key}.cls", example.label.encode()
        yield f"{key}.json", json.dumps({"size": len(example.data), "key": example.key, "box": [1, 2]}).encode()


def put_folders(store, examples, part=0, *, suffix="jpg"):
    for example in examples:
        store.write(f"{example.label}/{example.key}-{part}.{suffix}", example.data)


def put_masks(store, examples, part=0):
    """Images of classes, each with the bytes of another as its mask."""
    for example in examples:
        store.write(f"images/{example.label}/{example.key}-{part}.jpg", example.data)
        store.write(f"masks/{example.label}/{example.key}-{part}.png", example.data[::-1])


def put_masked_pairs(store, examples):
    """The same of examples that bring their masks; one that has none any more is removed."""
    there = {entry.object for entry in store.list()}
    for example in examples:
        store.write(f"images/{example.label}/{example.key}.pgm", example.data)
        name = f"masks/{example.label}/{example.key}.pgm"
        if example.mask:
            store.write(name, example.mask)
        elif name in there:
            store.remove(name)


def put_masked_webdataset(store, examples):
    store.write("shards/0.tar", masked_tar(examples))


def put_masked_compressed(store, examples):
    store.write("shards/0.tgz", gzip.compress(masked_tar(examples), mtime=0))


def masked_tar(examples):
    members = []
    for example in examples:
        key = f"{example.label}/{example.key}"
        members += [(f"{key}.pgm", example.data), (f"{key}.cls", example.label.encode())]
        members += [(f"{key}.mask.pgm", example.mask)] if example.mask else []
    return tar_of(members)


def put_masked_parquet(store, examples):
    columns = {
        "image": [{"bytes": example.data, "path": None} for example in examples],
        "mask": [(example.mask and {"bytes": example.mask, "path": None}) or None for example in examples],
    }
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {name: pa.array(cells, kind) for name, cells in columns.items() if any(cells)}
    out = io.BytesIO()
    pq.write_table(pa.table({**columns, "label": [example.label for example in examples]}), out, row_group_size=3)
    store.write("0.parquet", out.getvalue())


def arrow_of(table, rows=5):
    """A stream of record batches, as ``save_to_disk`` writes one."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue().to_pybytes()


def put_arrow(store, examples, part=0):
    image = pa.array([{"bytes": example.data, "path": None} for example in examples], ENCODED)
    columns = {"label": [example.label for example in examples], "image": image}
    store.write(f"{part}.arrow", arrow_of(pa.table({**columns, "key": [example.key for example in examples]})))


def put_masked_arrow(store, examples):
    columns = {
        "image": [{"bytes": example.data, "path": None} for example in examples],
        "mask": [(example.mask and {"bytes": example.mask, "path": None}) or None for example in examples],
    }
    columns = {name: pa.array(cells, ENCODED) for name, cells in columns.items() if any(cells)}
    store.write("0.arrow", arrow_of(pa.table({**columns, "label": [example.label for example in examples]}), 3))


def put_masked_urls(store, examples):
    rows = [("file_name", "mask", "label")]
    for example in examples:
        names = [f"{kind}/{example.label}/{example.key}.pgm" for kind in ("i", "m")]
        store.write(names[0], example.data)
        if example.mask:
            store.write(names[1], example.mask)
        rows.append((names[0], names[1] if example.mask else "", example.label))
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    store.write("labels.csv", out.getvalue().encode())


def put_masked_ready(store, examples):
    """One object of records, each as long as the example's bytes are, and one of their masks."""
    masks = [example.mask for example in examples]
    names = [f"{example.label}/{example.key}" for example in examples]
    layout = Layout.of(
        "masks", len(names), Applied.to(tiny_preprocess(), "uint8"), object_bytes=1 << 20, has_masks=any(masks)
    )
    contents = bytearray(layout.size(0))
    for row, example in enumerate(examples):
        contents[layout.offset(row) : layout.offset(row) + len(example.data)] = example.data
    classes = sorted({example.label for example in examples})
    samples = Samples(
        ids=stable_ids(names),
        objects=[object_name(0)] * len(names),
        offsets=np.array([layout.offset(row) for row in range(len(names))], np.int64),
        lengths=np.array([len(example.data) for example in examples], np.int64),
        labels=np.array([classes.index(example.label) for example in examples], np.int64),
    )
    part = ReadyPart(
        layout=layout.digest,
        number=0,
        sha256=hashlib.sha256(contents).hexdigest(),
        samples=samples,
        names=names,
        skipped=(),
        masks=MaskLocations.of(masks) if any(masks) else None,
        masks_sha256=hashlib.sha256(b"".join(masks)).hexdigest() if any(masks) else "",
    )
    store.write(LAYOUT, json.dumps(layout.to_json()).encode())
    store.write(object_name(0), bytes(contents))
    if any(masks):
        store.write(masks_beside(object_name(0)), b"".join(masks))
    store.write(TABLE, table_file(layout, [part], classes)[1])


def put_masked_table(store, examples):
    store.put_many(
        TableSample(f"{example.label}/{example.key}", example.data, -1, example.label, b"", example.mask or None)
        for example in examples
    )


def put_table(store, examples, part=0):
    """Into a table over CQL, under the names that they have in class folders."""
    store.put_many(
        TableSample(f"{example.label}/{example.key}-{part}.jpg", example.data, -1, example.label)
        for example in examples
    )


def put_ready(store, examples, part=0):
    """A ready format of all that was put until now: one record an object, each as long as the example's bytes are."""
    put = {f"{example.label}/{example.key}-{part}.jpg": (example.label, example.data) for example in examples}
    names = [entry.object for entry in store.list()]
    if TABLE in names:
        put = _ready_records(store) | put
    applied = Applied.to(tiny_preprocess(), "uint8")
    layout = Layout.of("formats", len(put), applied, object_bytes=1)
    classes = sorted({label for label, _ in put.values()})
    ids = stable_ids(list(put))
    parts = []
    store.write(LAYOUT, json.dumps(layout.to_json()).encode())
    for number, (name, (label, data)) in enumerate(put.items()):
        contents = data.ljust(layout.size(number), b"\0")
        if object_name(number) not in names or store.read(object_name(number), 0, len(contents)) != contents:
            store.write(object_name(number), contents)
        samples = Samples(
            ids=ids[number : number + 1],
            objects=[object_name(number)],
            offsets=np.zeros(1, np.int64),
            lengths=np.array([len(data)], np.int64),
            labels=np.array([classes.index(label)], np.int64),
        )
        sha256 = hashlib.sha256(contents).hexdigest()
        parts.append(
            ReadyPart(layout=layout.digest, number=number, sha256=sha256, samples=samples, names=[name], skipped=())
        )
    store.write(TABLE, table_file(layout, parts, classes)[1])


def _ready_records(store):
    """What was put before, by its name."""
    entries = list(store.list())
    listed = ReadyFormat().read(store, entries)
    return {
        row["name"]: (listed.classes[row["label"]], bytes(store.read(row["object"], 0, row["length"])))
        for row in listed.table.to_pylist()
    }


def put_webdataset(store, examples, part=0, **options):
    store.write(f"shards/train-{part:06}.tar", tar_of(webdataset_files(examples, **options)))


def put_compressed(store, examples, part=0):
    data = gzip.compress(tar_of(webdataset_files(examples)), mtime=0)
    store.write(f"shards/train-{part:06}.{('tar.gz', 'TGZ')[part % 2]}", data)


def parquet_of(examples, *, nested=True, names=None, group=5, **options):
    """A Parquet file as Hugging Face writes them; with names of classes labels are numbers, else texts."""
    images = [{"bytes": example.data, "path": f"{example.key}.jpg"} if nested else example.data for example in examples]
    labels = [example.label if names is None else names.index(example.label) for example in examples]
    features = {"image": {"_type": "Image"}}
    if names is not None:
        features["label"] = {"_type": "ClassLabel", "names": list(names)}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if nested else pa.binary()
    columns = {"image": pa.array(images, kind), "label": pa.array(labels), "key": [example.key for example in examples]}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    out = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(about), out, row_group_size=group, **options)
    return out.getvalue()


def put_urls(store, examples, part=0, *, away=None):
    """A list beside the images, or of images in another store."""
    place = away or store
    rows = [("file_name", "label", "key")]
    for example in examples:
        name = f"images-{part}/{example.label}/{example.key}.jpg"
        place.write(name, example.data)
        rows.append((object_url(away.url, name) if away else name, example.label, example.key))
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    store.write(f"labels-{part}.csv", out.getvalue().encode())


def put_parquet(store, examples, part=0, **options):
    store.write(f"data/train-{part:05}.parquet", parquet_of(examples, **options))
