"""Seven measured networks: the table in ``benchmarks/results`` is what the code gives, and no rule beats the plan."""

import json
import runpy
from pathlib import Path

import pytest

from frostline.planning import POLICIES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BEYOND_ROUNDING = 1.0001


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return runpy.run_path(str(BENCHMARKS / "what_if.py"))


@pytest.fixture(scope="module")
def cells():
    found = json.loads((BENCHMARKS / "results" / "2026-11-21-what-if.json").read_text(encoding="utf-8"))
    return [dict(zip(found["columns"], cell, strict=True)) for cell in found["cells"]]


def test_the_grid_has_every_network_link_store_and_trainer(tools, cells):
    places = {tuple(cell[name] for name in ("network", "gbit_per_s", "store_speed", "trainer_speed")) for cell in cells}
    axes = [tools[name] for name in ("NETWORKS", "GBITS", "SPEEDS", "TRAINERS")]
    assert len(places) == len(cells) == len(axes[0]) * len(axes[1]) * len(axes[2]) * len(axes[3])


def test_no_rule_that_trains_at_the_trainer_is_faster_in_any_cell(cells):
    for rule in POLICIES[1:]:
        if rule != "all_in_store":
            assert max(cell[rule] for cell in cells) <= BEYOND_ROUNDING, rule


def test_a_job_gives_up_no_more_than_the_noise(cells):
    assert min(cell["as a job takes it"] for cell in cells) >= 0.95


@pytest.mark.parametrize("place", range(0, 784, 112))
def test_the_table_is_what_the_code_gives(tools, cells, place):
    cell = cells[place]
    situation = tools["read"](BENCHMARKS / "profiles" / f"{cell['network']}.json")
    again = tools["predicted"](situation, cell["gbit_per_s"], cell["store_speed"], cell["trainer_speed"])
    assert again["samples_per_s"] == pytest.approx(cell["samples_per_s"], rel=1e-3)
    assert again["relative"] == pytest.approx({name: cell[name] for name in again["relative"]}, abs=1e-3)


@pytest.mark.parametrize(
    ("network", "encoded_bytes", "line_bytes"),
    [
        ("alexnet", 110_000, 16_384),
        ("densenet121", 110_000, 4_096),
        ("resnet18", 110_000, 2_048),
        ("resnet50", 110_000, 8_192),
        ("vit_small", 110_000, 1_536),
    ],
)
def test_the_profiles_are_cut_where_the_network_is_thin(tools, network, encoded_bytes, line_bytes):
    situation = tools["read"](BENCHMARKS / "profiles" / f"{network}.json")
    assert situation.encoded_bytes == encoded_bytes
    assert situation.frost_line.bytes_per_sample == line_bytes
