"""Prints which files of Frostline, and which of its threads, samples pass on their way to a batch, as JSON.

python -P traced.py FOLDER CUT    # CUT 0 loads plain pixels; another runs frozen layers up to there
"""

import json
import sys
import threading

_SOURCE = "/src/frostline/"
_FIRST, _LAST = 16, 40  # the batches between which calls are recorded: all threads run, and the window is full

files, threads, calls = set(), set(), 0
is_recording = False


def record(frame, event, _):
    """Note a call of Frostline's code."""
    global calls
    if event == "call" and is_recording:
        _, found, file = frame.f_code.co_filename.partition(_SOURCE)
        if found:
            files.add(file)
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
    global is_recording
    import frostline as fl

    settings = fl.LoaderSettings(window_bytes=16 << 20)
    model = network() if cut else None
    with fl.offload(model, fl.Dataset(folder), cut=cut or None, settings=settings) as job:
        for number, batch in enumerate(job.loader(8, shuffle=True), 1):
            assert len(batch.labels) == 8
            is_recording = _FIRST <= number < _LAST
            if number == _LAST:
                break
    samples = 8 * (_LAST - _FIRST)
    print(json.dumps({"files": sorted(files), "threads": sorted(threads), "calls_per_sample": calls / samples}))


if __name__ == "__main__":
    sys.setprofile(record)
    threading.setprofile(record)
    main(sys.argv[1], int(sys.argv[2]))
