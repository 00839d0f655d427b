"""Writes samples in every form there is, to any store; some of them broken on purpose."""

import csv
import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq

from frostline.stores.cql_putting import TableSample
from frostline.stores.urls import object_url


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
    for one in examples:
        key = f"{one.label}/{one.key}"
        yield f"{key}.{suffix}", one.data
        yield f"{key}.cls", one.label.encode()
        yield f"{key}.json", json.dumps({"size": len(one.data), "key": one.key, "box": [1, 2]}).encode()


def put_folders(store, examples, part=0, *, suffix="jpg"):
    for one in examples:
        store.write(f"{one.label}/{one.key}-{part}.{suffix}", one.data)


def put_masks(store, examples, part=0):
    """Images of classes, each with the bytes of another as its mask."""
    for one in examples:
        store.write(f"images/{one.label}/{one.key}-{part}.jpg", one.data)
        store.write(f"masks/{one.label}/{one.key}-{part}.png", one.data[::-1])


def put_table(store, examples, part=0):
    """Into a table over CQL, under the names that they have in class folders."""
    store.put_many(TableSample(f"{one.label}/{one.key}-{part}.jpg", one.data, -1, one.label) for one in examples)


def put_webdataset(store, examples, part=0, **options):
    store.write(f"shards/train-{part:06}.tar", tar_of(webdataset_files(examples, **options)))


def parquet_of(examples, *, nested=True, names=None, group=5, **options):
    """A Parquet file as Hugging Face writes them; with names of classes labels are numbers, else texts."""
    images = [{"bytes": one.data, "path": f"{one.key}.jpg"} if nested else one.data for one in examples]
    labels = [one.label if names is None else names.index(one.label) for one in examples]
    features = {"image": {"_type": "Image"}}
    if names is not None:
        features["label"] = {"_type": "ClassLabel", "names": list(names)}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if nested else pa.binary()
    columns = {"image": pa.array(images, kind), "label": pa.array(labels), "key": [one.key for one in examples]}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    out = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(about), out, row_group_size=group, **options)
    return out.getvalue()


def put_urls(store, examples, part=0, *, away=None):
    """A list beside the images, or of images in another store."""
    place = away or store
    rows = [("file_name", "label", "key")]
    for one in examples:
        name = f"images-{part}/{one.label}/{one.key}.jpg"
        place.write(name, one.data)
        rows.append((object_url(away.url, name) if away else name, one.label, one.key))
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    store.write(f"labels-{part}.csv", out.getvalue().encode())


def put_parquet(store, examples, part=0, **options):
    store.write(f"data/train-{part:05}.parquet", parquet_of(examples, **options))
