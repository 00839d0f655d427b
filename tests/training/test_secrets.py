"""What a run writes and says holds no secret: not the store's, not the table's, not the tenant's."""

import pytest

from frostline.cli import main
from support.images import image_folder


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
