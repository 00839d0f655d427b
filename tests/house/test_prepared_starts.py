"""Processes that are forked from a prepared one are what a plain start gives, but for what is imported already."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from support.prepared import PLAIN, prepared_starts

SEEN = """
import json, os, signal, sys, threading
print(json.dumps({
    "name": __name__, "words": sys.argv, "given": sys.orig_argv, "path": sys.path, "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(), "folder": os.getcwd(), "environment": dict(os.environ),
    "descriptors": [number for number in range(100) if os.path.exists(f"/proc/self/fd/{number}")],
    "threads": threading.active_count(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "said": sys.stdin.read(),
    "shown": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
}))
"""
IMPORTED = "import sys; print('torch' in sys.modules)"


@pytest.fixture(scope="module", autouse=True)
def starts():
    """With a module to import, so that the first start is prepared too."""
    with prepared_starts("json"):
        yield


def both(*arguments, **options):
    """What is so for a plain start, and for a prepared one."""
    plain = {**options, "preexec_fn": int}  # which no prepared one can call
    return [subprocess.run([sys.executable, *arguments], capture_output=True, **how) for how in (plain, options)]


def test_a_start_is_prepared_where_nothing_forbids_it():
    assert [done.stdout for done in both("-c", IMPORTED)] == [b"False\n", b"True\n"]


def test_what_it_starts_itself_is_prepared_too_in_each_generation():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IMPORTED!r}])"
    assert [done.stdout for done in both("-c", code)] == [b"False\n", b"True\n"]
    twice = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    assert [done.stdout for done in both("-c", twice)] == [b"False\n", b"True\n"]


@pytest.mark.parametrize("safe", [(), ("-P",)])
@pytest.mark.parametrize("session", [False, True])
def test_a_program_sees_what_it_would_see_after_a_plain_start(tmp_path, safe, session):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OWN": "1"}
    first, second = both(
        *safe, "-c", SEEN, "a", "b c", input=b"words", cwd=tmp_path, env=environment, start_new_session=session
    )
    seen = json.loads(first.stdout)
    assert json.loads(second.stdout) == seen
    assert seen["parent"] == os.getpid()
    assert seen["said"] == "words"


@pytest.mark.parametrize(
    "end", ["sys.exit(3)", "sys.exit('so')", "os._exit(4)", "1 / 0", "os.kill(os.getpid(), 9)", ""]
)
def test_it_ends_as_after_a_plain_start(end):
    at_exit = "import atexit, os, sys, threading, time\natexit.register(print, 'so')\n"
    thread = "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()\n"
    first, second = both("-c", at_exit + thread + end)
    assert (second.returncode, second.stdout) == (first.returncode, first.stdout)
    assert second.stderr.splitlines()[-1:] == first.stderr.splitlines()[-1:]


def test_an_interrupt_that_nothing_catches_ends_it_as_one():
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_scripts_and_modules_run_as_main(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import beside; print(__name__, __file__, beside.HERE)")
    (tmp_path / "beside.py").write_text("HERE = 1")
    for arguments in ((str(script), "x"), ("-m", "script"), ("-m", "json.tool")):
        first, second = both(*arguments, cwd=tmp_path, input=b"[1]")
        assert first.stdout == second.stdout != b""


def test_descriptors_that_it_is_given_keep_their_numbers():
    ours, theirs = os.pipe()
    with open(ours) as said:  # noqa: PTH123 (a descriptor)
        subprocess.run([sys.executable, "-c", f"import os; os.write({theirs}, b'so')"], pass_fds=(theirs,), check=True)
        os.close(theirs)
        assert said.read() == "so"


def test_what_only_a_start_reads_is_that_of_this_process():
    """Limits and cores are inherited; variables of OpenMP are read when torch is imported."""
    code = "import os, resource, torch; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], torch.get_num_threads())"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
    try:
        command, environment = [sys.executable, "-c", code], {**os.environ, "OMP_NUM_THREADS": "1"}
        said = subprocess.run(command, env=environment, capture_output=True).stdout
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert said == b"500 1\n"


def test_a_pool_of_spawned_processes_is_of_children_of_this_one():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert processes.submit(os.getppid).result() == os.getpid()


def test_folders_with_modules_of_their_own_have_a_plain_start(tmp_path):
    (tmp_path / "numpy.py").write_text("HERE = 1")
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    done = both("-P", "-c", "import numpy; print(numpy.HERE)", env={**os.environ, "PYTHONPATH": path})
    assert [one.stdout for one in done] == [b"1\n", b"1\n"]


def test_a_test_may_have_plain_starts(monkeypatch):
    monkeypatch.setenv(PLAIN, "1")
    assert [done.stdout for done in both("-c", IMPORTED)] == [b"False\n", b"False\n"]


def test_a_program_that_is_not_there_is_told_as_ever(tmp_path):
    with pytest.raises(FileNotFoundError):
        subprocess.run([sys.executable, "-c", ""], cwd=tmp_path / "nowhere")
