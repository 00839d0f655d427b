"""Prints which files of Frostline, and which of its threads, samples pass on their way to a batch, as JSON.

python -P traced.py FOLDER CUT         # CUT 0 loads plain pixels; another runs frozen layers up to there
python -P traced.py FOLDER CUT http    # by a node that is asked over HTTP; it runs in this process, and counts
"""

import json
import sys
import threading
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path

_SOURCE = "/src/frostline/"
_FIRST, _LAST = 24, 88  # the batches between which calls are recorded: all threads run, and the window is full

# The calls are cut into pieces of so many, and a file is on the way if it is called in as many pieces as a fifth of the
# batches: requests are made for one in four. Work is the measure and not the moment, since on a busy machine several
# requests are made while the loop stands at one batch. What happens now and then is not on the way: up to four threads
# start in a slow run, and the window changes its bounds.
_CALLS_OF_A_PIECE = 100
_ONE_IN = 5

pieces_by_file, threads, calls = defaultdict(set), set(), 0
at_batch = 0


def record(frame, event, _):
    """Note a call of Frostline's code."""
    global calls
    if event == "call" and _FIRST <= at_batch < _LAST:
        _, found, file = frame.f_code.co_filename.partition(_SOURCE)
        if found:
            pieces_by_file[file].add(calls // _CALLS_OF_A_PIECE)
            threads.add(threading.current_thread().name.rpartition("_")[0] or "loop")
            calls += 1


def network():
    """Three frozen layers and a head."""
    import torch

    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    for parameter in layers[:3].parameters():
        parameter.requires_grad_(False)
    return layers


@contextmanager
def served(folder):
    """The address of a node for a folder, which tries no engines."""
    import frostline as fl
    from frostline.node import Node
    from frostline.node.http.server import Server, listen

    with Node(fl.NodeSettings(memory_bytes=1 << 30, trial_s=0), (Path(folder).as_uri(),)) as node:
        server, listening = Server(node, listen("127.0.0.1", 0)), threading.Event()
        thread = threading.Thread(target=server.run, args=(listening.set,))
        thread.start()
        try:
            assert listening.wait(60)
            yield server.url
        finally:
            server.stop()
            thread.join()


def main(folder, cut, way=""):
    """Take some batches of eight, and print what they passed."""
    global at_batch
    import frostline as fl

    # Few rows fit, so that requests are made as long as batches are taken: pixels, or eight numbers a sample.
    settings = fl.LoaderSettings(window_bytes=4096 if cut else 8 << 20)
    model = network() if cut else None
    with ExitStack() as stack:
        near = stack.enter_context(served(folder)) if way == "http" else None
        job = stack.enter_context(fl.offload(model, fl.Dataset(folder), cut=cut or None, settings=settings, near=near))
        for number, batch in enumerate(job.loader(8, shuffle=True), 1):
            assert len(batch.labels) == 8
            at_batch = number
            if number == _FIRST:
                sys.setprofile(record)
            if number == _LAST:
                break
    samples = 8 * (_LAST - _FIRST)
    files = sorted(file for file, pieces in pieces_by_file.items() if len(pieces) >= (_LAST - _FIRST) / _ONE_IN)
    print(json.dumps({"files": files, "threads": sorted(threads), "calls_per_sample": calls / samples}))


if __name__ == "__main__":
    threading.setprofile(record)  # for threads that start from now on; this one is watched from the first batch on
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
