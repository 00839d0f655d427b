"""Tests pass however they are started: what a process was given by who started it is put right before they begin."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

SEEN = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from support.started import forget_how_it_was_started
forget_how_it_was_started()
import subprocess
child = "import signal; print(int(signal.getsignal(signal.SIGINT) is signal.default_int_handler))"
mask = os.umask(0)
print(json.dumps({
    "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "child interrupted": int(subprocess.run([sys.executable, "-c", child], capture_output=True).stdout),
    "ended": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGQUIT)],
    "hung up": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "input": os.fstat(0).st_size,
    "mask": mask,
    "names": sorted(set(os.environ) & {"http_proxy", "RANK", "LC_ALL", "FROSTLINE_TOKEN", "FROSTLINE_AXE"}),
}))
"""


def started_oddly():
    """In a child before it runs Python."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGUSR1))
    os.umask(0o077)
    os.close(0)


def test_signals_descriptors_file_mode_and_environment_are_those_of_a_plain_start():
    odd = {"http_proxy": "http://127.0.0.1:9", "RANK": "1", "LC_ALL": "C", "FROSTLINE_TOKEN": "t", "FROSTLINE_AXE": "x"}
    command = [sys.executable, "-c", SEEN, str(Path(__file__).parents[1])]
    done = subprocess.run(
        command, env=os.environ | odd, preexec_fn=started_oddly, stdout=subprocess.PIPE, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "interrupted": True,
        "child interrupted": 1,
        "ended": [True, True],
        "hung up": False,  # nohup means it
        "blocked": 0,
        "input": 0,
        "mask": 0o022,
        "names": ["FROSTLINE_AXE"],
    }


def test_this_run_can_be_interrupted():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
