"""Where tests find real photographs: a folder that is there, else a small set made once."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ROOT.parent / "shared" / "data" / "trashnet"


def photographs_folder(tmp_path_factory):
    named = os.environ.get("FROSTLINE_PHOTOGRAPHS")
    if named:
        return Path(named)
    if BESIDE.is_dir():
        return BESIDE
    from frostline.demo import make

    return make(tmp_path_factory.mktemp("photographs") / "set", per_class=16).directory / "train"
