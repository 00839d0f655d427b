"""Installs the built wheel in a fresh environment and runs what the README shows first, and the demo.

    python scripts/first_screen.py                   # as a stranger: packages and weights come over the network
    python scripts/first_screen.py --site DIR        # packages of DIR, and of further ones; nothing is fetched
    python scripts/first_screen.py --random-weights  # the network untrained, where no weights can be fetched

It builds the wheel, runs `frostline --version` and `frostline train --help`, starts `frostline serve` on a folder of
images that it draws, runs the README's loop near that node, and then an epoch of `frostline demo`, with --site on those
images in place of the demo's own, which take a minute of a core. What fails ends it with that command's output.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NODE = "http://store-1:7070"
FOLDER = "/data/photos"
IMAGES = """
from pathlib import Path
from PIL import Image
for number, colour in enumerate(("red", "green", "blue")):
    for each in range(12):
        path = Path("photos", colour, f"{each}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (256, 192), tuple(200 if place == number else 15 * each for place in range(3))).save(path)
"""


def loop_of(text):
    """The README's first lines of Python."""
    (lines,) = re.findall(r"^```python\n(import timm.*?)^```", text, re.M | re.S)
    return lines


def stranger(loop, url, *, random_weights):
    """The same lines near a node that is there."""
    if NODE not in loop:
        raise SystemExit(f"the README's loop names no node {NODE}")
    loop = loop.replace(NODE, url).replace(FOLDER, "photos")
    return loop.replace("pretrained=True", "pretrained=False") if random_weights else loop


def run(*command, cwd, **options):
    """Run a command; what it says is shown where it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=1800, **options
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:4]))}: {done.stdout}{done.stderr}")
    return done.stdout


def built(folder):
    """The wheel of the sources as they are."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder / "dist", cwd=ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install(python, *wanted):
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted, cwd=python.parent)


def installed(folder, wheel, sites):
    """The Python of a new environment that has the wheel, and sees the packages in some folders."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    if not sites:
        install(python, f"{wheel}[torch]", "timm")
    else:
        install(python, "--no-deps", "--no-index", wheel)
        (beside,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (beside / "beside.pth").write_text("\n".join(str(Path(site).resolve()) for site in sites), encoding="utf-8")
    where = run(python, "-c", "import frostline; print(frostline.__file__)", cwd=folder).strip()
    if not Path(where).is_relative_to(folder):
        raise SystemExit(f"frostline comes from {where}, not from the wheel")
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", action="append", help="folder of installed packages that the new environment sees")
    parser.add_argument("--random-weights", action="store_true")
    asked = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        wheel = built(folder)
        python = installed(folder, wheel, asked.site)
        frostline = python.with_name("frostline")
        print(run(frostline, "--version", cwd=folder).strip())
        run(frostline, "train", "--help", cwd=folder)
        run(python, "-c", IMAGES, cwd=folder)
        node = subprocess.Popen(
            [frostline, "serve", "--data-root", folder / "photos", "--listen", "127.0.0.1:0"],
            cwd=folder, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            url = next(found[0] for line in node.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            lines = loop_of((ROOT / "README.md").read_text(encoding="utf-8"))
            loop = stranger(lines, url, random_weights=asked.random_weights)
            (folder / "loop.py").write_text(f"{loop}assert loss.item() > 0\njob.close()\n", encoding="utf-8")
            run(python, "loop.py", cwd=folder)
        finally:
            node.terminate()
            node.wait(60)
        if not asked.site:
            install(python, f"{wheel}[demo]")
        own = ("--data", "photos") if asked.site else ()
        said = run(frostline, "demo", "--epochs", "1", "--out", "demo", *own, cwd=folder)
        if "held-out accuracy" not in said or not (folder / "demo").is_dir():
            raise SystemExit(f"frostline demo: {said}")
    print("the README's first screen and the demo run from the wheel")


if __name__ == "__main__":
    main()
