"""Converted files are kept whole or not at all."""

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from frostline.engines.recipe import clear_unfinished, converted_files


def write(text):
    def make(place):
        (place / "file").write_text(text)

    return make


def test_files_are_made_once_for_a_name(tmp_path):
    with converted_files(tmp_path / "new", "one", write("first")) as place:
        assert (place / "file").read_text() == "first"
    with converted_files(tmp_path / "new", "one", write("second")) as place:
        assert (place / "file").read_text() == "first"
    with converted_files(tmp_path / "new", "other", write("second")) as place:
        assert (place / "file").read_text() == "second"


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path):
    def fail(place):
        (place / "half").write_text("")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError), converted_files(tmp_path, "one", fail):
        pass
    assert list(tmp_path.iterdir()) == []


def test_keeps_one_of_two_simultaneous_conversions(tmp_path):
    barrier = threading.Barrier(2)
    seen = []

    def meet(place):
        barrier.wait(timeout=200)
        (place / "file").write_text("whole")

    def convert():
        with converted_files(tmp_path, "one", meet) as place:
            seen.append((place / "file").read_text())

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["whole", "whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_without_a_folder_nothing_outlives_its_use():
    with converted_files(None, "one", write("first")) as place:
        assert (place / "file").exists()
    assert not place.exists()


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from frostline.engines.recipe import converted_files

    def die(place):
        (place / "half").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)

    with converted_files(Path(sys.argv[1]), "one", die):
        pass
"""


def test_clears_up_after_a_killed_conversion_but_not_a_running_one(tmp_path):
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)])
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1

    def make(place):
        clear_unfinished(tmp_path)
        assert list(tmp_path.iterdir()) == [place]
        (place / "file").write_text("whole")

    with converted_files(tmp_path, "one", make) as place:
        assert (place / "file").read_text() == "whole"
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
