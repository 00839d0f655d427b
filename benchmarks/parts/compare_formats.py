"""The data of compare.py in every format that its loaders take, made once and put into a store."""

import io
import random
import tarfile
from itertools import islice
from pathlib import Path

OBJECT_BYTES = 100_000
# Of each shard, whatever its format: several for each worker, in data that is small.
SHARD_BYTES = 8 << 20
# Samples of the warm-up, which have objects of their own.
WARM = 128
PARTS = ("warm", "all")
BUCKET = "compare"
# What is not decoded has the suffix of an array, by which it is listed.
SUFFIX = {"photographs": "jpg", "objects": "npy"}


def samples_of(what, photographs, count):
    """So many samples: the encoded bytes and the label of each."""
    if what == "objects":
        noise = random.Random(0)
        return [(noise.randbytes(OBJECT_BYTES), number % 10) for number in range(count)]
    paths = sorted(Path(photographs).glob("*/*.jpg"))
    classes = sorted({path.parent.name for path in paths})
    mixed = random.Random(0).sample(paths, len(paths))
    return [
        (path.read_bytes(), classes.index(path.parent.name))
        for path in (mixed[number % len(mixed)] for number in range(count))
    ]


def make_formats(folder, photographs, counts, forms):
    """Write formats under a folder, as ``WHAT/PART/FORMAT/...``; what it has is kept.

    Args:
        folder: where they go.
        photographs: folders of them, one a class.
        counts: samples of the warm-up and of all, by what they are.
        forms: names of formats.
    """
    for what, numbers in counts.items():
        for part, number in zip(PARTS, numbers, strict=True):
            for form in forms:
                target = folder / what / part / form
                if not (target.parent / f"{form}.done").exists():
                    target.mkdir(parents=True, exist_ok=True)
                    FORMS[form](target, what, samples_of(what, photographs, number))
                    (target.parent / f"{form}.done").touch()


def _files(folder, what, samples):
    for number, (encoded, label) in enumerate(samples):
        path = folder / f"{label}" / f"{number:06}.{SUFFIX[what]}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded)


def _shards(folder, what, samples):
    for number, shard in enumerate(_in_shards(samples)):
        with tarfile.open(folder / f"{number:06}.tar", "w") as tar:
            for place, (encoded, label) in enumerate(shard):
                for suffix, content in ((SUFFIX[what], encoded), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{number:06}{place:06}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def _in_shards(samples):
    rest = iter(samples)
    average = sum(len(encoded) for encoded, _ in samples) / len(samples)
    while shard := list(islice(rest, max(1, round(SHARD_BYTES / average)))):
        yield shard


def _mds(folder, what, samples):
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES, exist_ok=True) as writer:
        for encoded, label in samples:
            writer.write({"image": encoded, "label": label})


def _litdata(folder, what, samples):
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_bytes=SHARD_BYTES)
    for number, (encoded, label) in enumerate(samples):
        cache[number] = {"image": encoded, "label": label}
    cache.done()
    cache.merge(1)


FORMS = {"files": _files, "shards": _shards, "mds": _mds, "litdata": _litdata}
