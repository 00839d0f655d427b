"""What a run writes and says holds no secret: not the store's, not the table's, not the tenant's."""

import http.client
import json
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from frostline.cli import main
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import Unauthenticated
from frostline.training.settings import JobSettings
from frostline.training.setup import set_up
from frostline.training.start import begin
from frostline.wire.connection import address_of
from support.images import image_folder

pytestmark = pytest.mark.promise("secret", mended="a job's own node read its user's files to everybody on the machine")


def test_no_secret_gets_into_the_files_and_words_of_a_training(s3, tmp_path, monkeypatch, capfd):
    s3.put_folder(image_folder(tmp_path / "photos", per_class=6), "trained")
    environment = s3.environment() | {"FROSTLINE_TOKEN": "open-sesame", "FROSTLINE_CQL_PASSWORD": "hunter2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "run"
    about = [
        "--data",
        "s3://trained",
        "--model",
        "support.networks:Small",
        "--until",
        "stem",
        "--memory",
        "512MiB",
    ]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", *about, "--epochs", "1", "--batch-size", "8", "--out", str(out)])
    written = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {"report.json", "report.html"} <= written.keys()
    said = capfd.readouterr()
    secrets = [environment[name] for name in ("AWS_SECRET_ACCESS_KEY", "FROSTLINE_TOKEN", "FROSTLINE_CQL_PASSWORD")]
    for secret in (*secrets, environment["AWS_ACCESS_KEY_ID"]):
        assert not [name for name, data in written.items() if secret.encode() in data]
        assert secret not in said.out + said.err


@pytest.mark.parametrize(
    "url", ["https://user:hunter2@host/photos", "s3://key:hunter2@photos/a", "cql://me:hunter2@host/k/t"]
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url, tmp_path, capfd):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "--data", url, "--model", "support.networks:Small", "--until", "stem", "--out", str(tmp_path)])
    said = capfd.readouterr()
    assert "hunter2" not in said.out + said.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def a_job(folder):
    node = NodeSettings(memory_bytes=1 << 28, trial_s=0)
    return JobSettings(data=str(folder), model="support.networks:Small", until="stem", node=node)


ROUTES = (
    ("GET", "/v1/health"),
    ("GET", "/v1/statistics"),
    ("GET", "/v1/metrics"),
    ("GET", "/v1/view"),
    ("POST", "/v1/features"),
    ("POST", "/v1/profiles"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/listings"),
    ("POST", "/v1/trainings"),
    ("GET", "/v1/trainings/x"),
    ("POST", "/v1/pieces"),
    ("POST", "/v1/stages"),
    ("PUT", f"/v1/prefixes/{'0' * 64}"),
    ("PATCH", "/v1/tenants/job"),
)


@pytest.mark.parametrize("token", [None, "of-the-user"])
def test_the_node_of_a_job_answers_nobody_else_who_reaches_the_loopback(tmp_path, monkeypatch, token):
    folder = image_folder(tmp_path / "private", per_class=4)
    folder.chmod(0o700)
    if token is None:
        monkeypatch.delenv("FROSTLINE_TOKEN", raising=False)
    else:
        monkeypatch.setenv("FROSTLINE_TOKEN", token)
    job = replace(a_job(folder), loader=LoaderSettings())
    with begin(job, lambda _: None, min_classes=2) as begun, set_up(job, lambda _: None, begun=begun) as setup:
        assert begun.token not in repr(begun)
        assert token in (None, begun.token)
        url = begun.process.url
        for method, path in ROUTES:
            for said in ({}, {"Authorization": "Bearer nothing"}):
                with closing(http.client.HTTPConnection(*address_of(url), timeout=60)) as peer:
                    peer.request(method, path, b"{}" if method != "GET" else None, said)
                    answer = peer.getresponse()
                    assert (answer.status, json.loads(answer.read())["error"]) == (401, "Unauthenticated"), path
        with closing(HttpTransport(url, LoaderSettings(token="guessed"))) as stranger, pytest.raises(Unauthenticated):
            stranger.health()
        assert len(list(setup.job.loader(batch_size=4))) == 3, "the job itself is answered"
        words = Path(f"/proc/{begun.process.pid}/cmdline").read_bytes()
        assert str(folder).encode() not in words, "nobody reads it from the command line"
        os.kill(begun.process.pid, signal.SIGKILL)
        begun.process.wait()
        assert begun.process.restart_if_dead()
        with closing(HttpTransport(begun.process.url, LoaderSettings(token=begun.token))) as transport:
            assert folder.samefile(transport.health().roots[0].removeprefix("file://"))
