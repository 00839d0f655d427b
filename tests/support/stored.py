"""Features whose every byte follows from their key, so that a reader knows what each must be; and a writer of them.

As a program it writes rows to a cache on disk, from the first up to a last one or until it is killed, and says after
each batch how far it is:

    python -m support.stored FOLDER BUDGET_BYTES FIRST [STOP]
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from frostline.cache import FeatureStore, RowLayout

SCOPE = hashlib.sha256(b"a scope").digest()
LAYOUT = RowLayout(shapes=((3, 500), (7,)), dtypes=("float32", "int64"))
ROWS = 16
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parents[1])])}


def key(number, scope=SCOPE):
    return hashlib.blake2b(scope + number.to_bytes(8, "little"), digest_size=16).digest()


def keys(numbers, scope=SCOPE):
    return [key(number, scope) for number in numbers]


def tensors(numbers, layout=LAYOUT):
    """The rows that belong to the numbers."""
    out = layout.empty(len(numbers))
    for place, number in enumerate(numbers):
        random = np.random.default_rng(number)
        for tensor in out:
            tensor[place] = random.integers(0, 120, tensor.shape[1:])
    return out


def put(store, numbers, scope=SCOPE, layout=LAYOUT):
    return store.put(scope, keys(numbers, scope), tensors(numbers, layout))


def checked(store, numbers, scope=SCOPE, layout=LAYOUT):
    """The numbers that are found; each of their rows is what it must be, to the last bit."""
    numbers = list(numbers)
    out = layout.empty(len(numbers))
    found = store.get_into(scope, keys(numbers, scope), layout, out)
    there = [number for number, is_there in zip(numbers, found, strict=True) if is_there]
    for got, wanted in zip(out, tensors(there, layout), strict=True):
        assert np.array_equal(got[found], wanted), "a row came back that is not what was put there"
    return there


def python(*argv):
    """Start Python with what these tests can import."""
    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def writing(folder, budget_bytes, first, *stop):
    """Start this program in a process of its own."""
    return python("-m", "support.stored", folder, budget_bytes, first, *stop)


def main(folder, budget_bytes, first, stop=1 << 40):
    with FeatureStore(Path(folder), int(budget_bytes)) as store:
        for number in range(int(first), int(stop), ROWS):
            put(store, range(number, number + ROWS))
            print(number + ROWS, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
