"""Prints which files of Frostline, and which of its threads, samples pass on their way to a batch, as JSON.

python -P traced.py FOLDER CUT    # CUT 0 loads plain pixels; another runs frozen layers up to there
"""

import json
import sys
import threading
from collections import defaultdict

_SOURCE = "/src/frostline/"
_FIRST, _LAST = 24, 88  # the batches between which calls are recorded: all threads run, and the window is full

# A file is on the way if it is called for at least one batch in so many: requests are made for one in six. What happens
# now and then is not: up to four threads start in a slow run, and the window changes its bounds.
_ONE_IN = 10

batches_by_file, threads, calls = defaultdict(set), set(), 0
at_batch = 0


def record(frame, event, _):
    """Note a call of Frostline's code."""
    global calls
    if event == "call" and _FIRST <= at_batch < _LAST:
        _, found, file = frame.f_code.co_filename.partition(_SOURCE)
        if found:
            batches_by_file[file].add(at_batch)
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


def main(folder, cut):
    """Take some batches of eight, and print what they passed."""
    global at_batch
    import frostline as fl

    # Few rows fit, so that requests are made as long as batches are taken: pixels, or eight numbers a sample.
    settings = fl.LoaderSettings(window_bytes=4096 if cut else 8 << 20)
    model = network() if cut else None
    with fl.offload(model, fl.Dataset(folder), cut=cut or None, settings=settings) as job:
        for number, batch in enumerate(job.loader(8, shuffle=True), 1):
            assert len(batch.labels) == 8
            at_batch = number
            if number == _LAST:
                break
    samples = 8 * (_LAST - _FIRST)
    files = sorted(file for file, batches in batches_by_file.items() if len(batches) >= (_LAST - _FIRST) / _ONE_IN)
    print(json.dumps({"files": files, "threads": sorted(threads), "calls_per_sample": calls / samples}))


if __name__ == "__main__":
    sys.setprofile(record)
    threading.setprofile(record)
    main(sys.argv[1], int(sys.argv[2]))
