"""Traces that are kept: the same network is traced once on a machine, and another one is never taken for it."""

import subprocess
import sys
from dataclasses import replace
from types import MethodType

import pytest
import torch
from torch import nn

from frostline.core import TensorSpec
from frostline.models import tracing as exporting
from frostline.models.trace_cache import TraceCache, fingerprint, trace
from frostline.models.tracing import agrees

pytestmark = pytest.mark.usefixtures("plain_starts")

INPUTS = (TensorSpec((3, 8, 8)),)
SCALE = 2.0


class Small(nn.Module):
    def __init__(self, width=4, slope=0.1):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.slope = slope

    def forward(self, x):
        return {"scores": nn.functional.leaky_relu(self.norm(self.conv(x)), self.slope).mean((2, 3)) * SCALE}


class Other(Small):
    def forward(self, x):
        return {"scores": super().forward(x)["scores"] + torch.arange(4)}


class Casts(Small):
    """Changes a value's type, before which torch.export asserts what it was, as in most networks of transformers."""

    def forward(self, x):
        return {"scores": super().forward(x)["scores"].to(torch.float64)}


def flags(model):
    return {path: module.training for path, module in model.named_modules()}


def traced(model):
    return trace(model, INPUTS, training=flags(model))


def named(model, inputs=INPUTS):
    return fingerprint(model, inputs, flags(model))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "frostline" / "traces"


@pytest.fixture
def exports(monkeypatch):
    """The networks that were traced."""
    seen, export = [], exporting.export

    def counted(model, *args, **options):
        seen.append(model)
        return export(model, *args, **options)

    monkeypatch.setattr(exporting, "export", counted)
    return seen


@pytest.mark.parametrize("kind", [Small, Other, Casts])
def test_the_same_network_is_traced_once_and_its_trace_is_whole(kind, exports):
    first, again = traced(kind()), traced(kind())
    assert len(exports) == 1
    assert again.graph == first.graph
    assert again.structure == first.structure
    assert again.training == first.training
    assert again.constants.keys() == first.constants.keys()
    assert all(torch.equal(again.constants[name], value) for name, value in first.constants.items())


def test_a_kept_trace_spares_the_process_all_of_torch_export():
    lines = (
        "import sys, torch",
        "from torch import nn",
        "from frostline.models import cut_network",
        "body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).requires_grad_(False)",
        "found = cut_network(nn.Sequential(body, nn.Linear(144, 2)).eval(), (3, 8, 8))",
        "assert type(found.head).__name__ == 'SkippingHead', found.head",
        "print('torch._dynamo' in sys.modules)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    said = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() for _ in range(2)]
    assert said == ["True", "False"]


def test_the_values_of_weights_are_not_part_of_a_trace(exports):
    traced(Small())
    model = Small()
    with torch.no_grad():
        model.conv.weight.mul_(3)
    found = traced(model)
    assert len(exports) == 1
    assert agrees(model, found, INPUTS)


def slower(model):
    model.slope = 0.2


def with_a_note(model):
    model.note = "another"


def in_eval(model):
    model.eval()


def half_frozen(model):
    model.conv.requires_grad_(False)


def channels_last(model):
    model.to(memory_format=torch.channels_last)


def with_a_forward_of_its_own(model):
    model.forward = MethodType(lambda self, x: {"scores": self.conv(x)}, model)


def with_tied_tensors(model):
    model.norm.running_var = model.norm.running_mean


@pytest.mark.parametrize(
    "change",
    [slower, with_a_note, in_eval, half_frozen, channels_last, with_a_forward_of_its_own, with_tied_tensors],
)
def test_a_network_that_differs_in_this_has_another_name(change):
    model = Small()
    change(model)
    assert named(model) not in (None, named(Small()))


def test_other_inputs_classes_and_widths_have_other_names():
    names = [named(Small()), named(Small(width=5)), named(Other()), named(Small(), (TensorSpec((3, 9, 9)),))]
    assert len(set(names)) == len(names)


def test_a_method_that_was_replaced_gives_another_name(monkeypatch):
    before = named(Small())
    monkeypatch.setattr(Small, "forward", lambda self, x: self.conv(x))
    assert named(Small()) not in (None, before)


def with_a_hook(model):
    model.conv.register_forward_hook(lambda *_: None)


def with_a_plain_tensor(model):
    model.table = torch.ones(3)


def with_a_foreign_module(model):
    model.others = [nn.Linear(2, 2)]


@pytest.mark.parametrize("change", [with_a_hook, with_a_plain_tensor, with_a_foreign_module])
def test_traces_networks_without_a_digest_each_time(change, exports, folder):
    for _ in range(2):
        model = Small()
        change(model)
        assert named(model) is None
        traced(model)
    assert len(exports) == 2
    assert not folder.exists()


def test_a_kept_trace_that_the_network_does_not_agree_with_is_traced_anew(monkeypatch, exports):
    traced(Small())
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    model = Small()
    assert agrees(model, traced(model), INPUTS)
    assert len(exports) == 2


def test_comparing_modes_leaves_the_network_unchanged():
    model = Small()
    found, before = traced(model), {name: item.clone() for name, item in model.state_dict().items()}
    state = torch.get_rng_state()
    assert agrees(model, found, INPUTS)
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert flags(model) == flags(Small())


def test_a_trace_of_another_network_does_not_agree():
    other = Small(slope=0.5)
    assert not agrees(Small(), replace(traced(other), constants={}), INPUTS)


@pytest.mark.parametrize("damage", [lambda body: b"", lambda body: body[:100], lambda body: body[:200] + b"x" * 200])
def test_a_damaged_file_is_traced_anew(damage, exports, folder):
    traced(Small())
    [path] = folder.glob("*.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    traced(Small())
    traced(Small())
    assert len(exports) == 2


def test_a_folder_that_takes_no_file_costs_nothing_but_the_next_trace(folder, exports):
    folder.parent.mkdir()
    folder.write_text("")
    traced(Small())
    traced(Small())
    assert len(exports) == 2


def test_only_the_latest_traces_are_kept(monkeypatch, folder):
    monkeypatch.setattr("frostline.core.files._MAX_FILES", 2)
    cache, made = TraceCache(folder), traced(Small())
    for number in range(4):
        cache.put(f"{number}", made)
    assert len(list(folder.iterdir())) == 2
