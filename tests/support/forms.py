"""Writes samples in every form there is, to any store; some of them broken on purpose."""

import io
import json
import tarfile


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


def put_webdataset(store, examples, part=0, **options):
    store.write(f"shards/train-{part:06}.tar", tar_of(webdataset_files(examples, **options)))
