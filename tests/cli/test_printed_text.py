"""Text from outside, such as names and the words of nodes, is printed without what a terminal would follow."""

import ast
import json
import os
import pty
import subprocess
import sys
import threading
import unicodedata
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline.core.errors as errors
from frostline.core.errors import FrostlineError
from frostline.core.events import PhaseStarted, SetupWarning
from frostline.core.system import __version__
from frostline.core.units import log_named, printable
from frostline.jobs.statistics import warn_user
from frostline.node.http.connection_guard import LOG
from frostline.wire.messages import PROTOCOLS
from support.commands import run
from support.images import image_folder

CLI = Path(__file__).resolve().parents[2] / "src" / "frostline" / "cli"
ORDER = "\x1b]0;OWNED\x07\x1b[2J\x9b31m"
NAME = f"{ORDER}\r\nfrostline: all is well"
SMALL = ("--model", "support.networks:Small", "--until", "stem")
JOINING = "\u200c\u200d"


def is_followed(character):
    """Whether a terminal would follow a character, or show nothing of it, or turn what stands beside it."""
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and character not in JOINING


@given(st.text(st.characters(codec=None)) | st.text("\x1b\x07\n\r\t\u202e\ud800\u2028ab", max_size=9))
def test_any_text_becomes_one_line_that_a_terminal_shows(text):
    said = printable(text)
    unknown = [character for character in text if unicodedata.category(character) in {"Cn", "Co"}]
    assert not [character for character in said if is_followed(character) and character not in unknown]
    assert len(said.splitlines()) <= 1
    assert printable(said) == said
    said.encode()


@pytest.mark.parametrize("text", ["photos/ä ö – 猫 🏳️‍🌈", "می‌خواهم", "a\u3000b", "C:\\new", "", "\\x1b[2J"])
def test_text_that_is_shown_stays_as_it_is(text):
    assert printable(text) == text


def test_every_letter_of_every_script_stays():
    shown = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "LMNPS"]
    assert printable("".join(shown)) == "".join(shown)


@given(st.text(st.characters(codec=None)))
def test_every_error_says_its_sentence_printably(text):
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FrostlineError)]
    plain = [kind for kind in kinds if kind.__init__ is FrostlineError.__init__]
    assert len(plain) > 20
    for kind in plain:
        assert str(kind(text)) == printable(text)


def test_warnings_in_python_are_printable():
    with pytest.warns(UserWarning, match="OWNED") as caught:
        warn_user(SetupWarning(reason=NAME))
    assert str(caught[0].message) == printable(NAME)


def assert_shown(*said):
    text = "".join(said)
    assert "OWNED" in text, "what was planted is shown"
    assert not [character for character in text if is_followed(character) and character != "\n"]
    assert not [line for line in text.splitlines() if line.startswith("frostline: all is well")]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Images whose files and classes have names that are orders to terminals; one cannot be decoded."""
    root = image_folder(tmp_path_factory.mktemp("hostile"), per_class=4)
    first, *_ = sorted(path for path in root.iterdir() if path.is_dir())
    for number, image in enumerate(sorted(first.iterdir())):
        image.rename(first / f"{number}{NAME}.jpg")
    (first / f"9{NAME}.jpg").write_bytes(b"no image")
    first.rename(root / NAME)
    return root


@pytest.mark.parametrize(
    "verb",
    [
        "index --check",
        "train --epochs 1 --batch-size 4 --max-skipped-fraction 0.5 --val-share 0.25 --out run",
        "extract --out f.parquet --max-skipped-fraction 0.5",
        "extract --out f.parquet --max-skipped-fraction 0",
        "doctor",
    ],
)
def test_verbs_show_names_of_files_and_classes(capsys, hostile, near, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    name, *rest = verb.split()
    network = () if name == "index" else SMALL
    node = near if name in {"train", "extract"} else ()
    _, out, err = run(capsys, name, "--data", hostile, *network, *node, *rest)
    assert_shown(out, err)


def test_predictions_are_escaped_on_a_terminal_alone(capsys, hostile, near, tmp_path):
    how = ("--epochs", 1, "--batch-size", 4, "--max-skipped-fraction", 0.5, "--val-share", 0.25)
    run(capsys, "train", "--data", hostile, *SMALL, *how, *near, "--out", tmp_path / "run")
    asked = ("predict", "--run", tmp_path / "run", *SMALL[:2], "--data", hostile, "--max-skipped-fraction", 0.5, *near)
    code, out, err = run(capsys, *asked)
    assert code == 0, err
    assert NAME in out, "a table is as it is"
    assert_shown(err)
    shown = on_a_terminal(*map(str, asked))
    assert "OWNED" in shown
    assert_not_followed(shown)


def on_a_terminal(*arguments):
    """All that a command writes to a terminal."""
    ours, theirs = pty.openpty()
    verb = [sys.executable, "-c", "from frostline.cli import main; main()", *arguments]
    paths = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        verb, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env={**os.environ, "PYTHONPATH": paths}
    ):
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:  # its other end is closed
            pass
    os.close(ours)
    return b"".join(parts).decode()


def assert_not_followed(shown):
    for order in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\nfrostline: all is well"):
        assert order not in shown


@contextmanager
def a_node_that_says(health, statistics, status=200):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = json.dumps(health if self.path == "/v1/health" else statistics).encode()
            self.send_response(200 if self.path == "/v1/health" else status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        do_POST = do_DELETE = do_PUT

        def do_HEAD(self):
            self.send_response(200)  # it holds every network
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


HEALTH = {
    "version": __version__,
    "protocol": list(PROTOCOLS),
    "trouble": "",
    "host": "x",
    "hardware": NAME,
    "memory_bytes": 1 << 30,
    "roots": [NAME],
    "cores": [],
}
TOTALS = dict.fromkeys(("samples", "bytes_read", "bytes_sent", "compute_s", "cache_hits", "cache_misses"), 1)
STATISTICS = {
    "uptime_s": 3.0,
    "totals": TOTALS,
    "tenants": {NAME: {"totals": TOTALS}},
    "memory": {NAME: {"reserved_bytes": 1, "total_bytes": 2}},
    "requests_in_progress": 1,
    "waiting_for_device": 1,
    "devices_in_service": 1,
}
REFUSAL = {"error": "Forbidden", "message": NAME}


@pytest.mark.parametrize("status", [200, 403])
def test_what_nodes_say_is_shown(capsys, tmp_path, status):
    statistics = STATISTICS if status == 200 else REFUSAL
    with a_node_that_says(HEALTH, statistics, status) as url:
        for verb in (("top", "--once", "--every", "0.1"), ("doctor",), ("doctor", "--data", tmp_path)):
            _, out, err = run(capsys, *verb, "--near", url)
            assert_shown(out, err)
        shown = on_a_terminal("top", "--once", "--every", "0.1", "--near", url)
    assert "OWNED" in shown
    assert_not_followed(shown)


def test_what_a_node_refuses_a_job_is_shown(capsys, folder):
    with a_node_that_says({**HEALTH, "version": f"9{NAME}"}, REFUSAL, 403) as url:
        _, out, err = run(capsys, "train", "--data", folder, *SMALL, "--near", url)
        assert_shown(out, err)
        assert_not_followed(on_a_terminal("train", "--data", str(folder), *SMALL, "--near", url))


def test_wrong_options_and_phases_are_shown(capsys):
    from frostline.cli.show import ProgressBar

    _, out, err = run(capsys, "train", "--data", "x", f"--{NAME}")
    assert_shown(out, err)
    with ProgressBar(line_every_s=0) as progress:
        progress(PhaseStarted(name=f"{NAME}[/nothing]"))
        progress(SetupWarning(reason=NAME))
    said = capsys.readouterr()
    assert_shown(said.out, said.err)


def test_what_is_logged_where_nobody_set_logging_up_is_shown(capfd):
    script = "import logging; from frostline.core.units import printable_logs; printable_logs()\n"
    script += f"try:\n    1 / 0\nexcept Exception:\n    logging.getLogger('a').exception('%s', {NAME!r})\n"
    script += "try:\n    raise ValueError('z' * 99_999)\n"
    script += "except ValueError:\n    logging.getLogger('a').exception('c')\n"
    script += f"logging.getLogger('a').warning({NAME!r}); logging.getLogger('a').warning('b' * 99_999)\n"
    subprocess.run([sys.executable, "-c", script], check=True)
    said = capfd.readouterr().err
    assert_shown(said)
    assert said.endswith("b ... (83,615 characters more)\n")
    assert 10_000 < said.count("z") < 17_000


def test_what_is_logged_is_printable_whoever_has_set_logging_up(caplog):
    log_named("frostline.test").warning("cannot read %s: %d%%", NAME, 3)
    LOG.warning(NAME)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"cannot read {printable(NAME)}: 3%"
    assert second == printable(NAME)


def test_every_logger_writes_printable_sentences():
    found = []
    for path in CLI.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_made = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger") and node.args
            found += [path.name] if is_made else []
    assert found == ["units.py"]


def test_the_command_line_prints_by_one_function():
    """Else the next line that is printed would not be escaped."""
    found = []
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in {"click.echo", "click.secho", "print", "Text", "sys.stdout.write", "sys.stderr.write"}:
                found.append((path.name, name))
    assert sorted(found) == [
        ("logs.py", "click.echo"),  # JSON
        ("options.py", "click.echo"),  # the help
        ("show.py", "Text"),
        ("show.py", "click.echo"),
        ("show.py", "click.echo"),  # JSON
        ("show.py", "click.echo"),  # JSON
    ]
