"""The table of networks: each is frozen up to a layer and cut, and must give what it gives uncut.

    python benchmarks/network_table.py [--networks NAME,...] [--dtypes D,...] [--out FILE] [--page FILE.md]
    python benchmarks/network_table.py --from FILE.json --page docs/networks.md     # the page alone

Networks of torchvision, timm, transformers and diffusers with random weights and small inputs, in float32 and in
bfloat16, some with LoRA. Of each: the cuts, the frost line and what crosses it, and how far outputs and gradients of
the trained part lie from those of the same network uncut, in train mode with the same random numbers and in eval mode.
What fails is a row with the reason. With `--networks` and `--from` rows replace those of that file, which keeps the
others. With `--page` the table stands between two comments of that page. A dtype takes six minutes of a core.
"""

import copy
import gc
import json
import os
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from harness import run
from parts.network_zoo import IDS, MASK, NETWORKS, TOKENS, WORDS
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from frostline.core import TensorSpec
from frostline.core.errors import FrostlineError
from frostline.engines.graph_runner import Runner, leaf_values
from frostline.models import cut_network, freeze
from frostline.models.artifact import read_prefix, write_prefix
from frostline.models.freezing import classifier_of, frozen_modules, used_parameters
from frostline.models.tracing import UNFIT, cast_inputs, takes_parts, takes_rows

DTYPES = ("float32", "bfloat16")
ROWS, SEED = 2, 0


def made(row, dtype):
    """The network with its parameters frozen as the row says."""
    torch.manual_seed(SEED)
    model = row.build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    model = model.to(getattr(torch, dtype))
    if row.tuned:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=row.tuned, init_lora_weights=False))
    until = row.until.split("+")
    return freeze(model.train(), until if len(until) > 1 else row.until, input_shape=frozen_by(row))


def frozen_by(row):
    """What ``freeze`` is told of the inputs: by name where there are several kinds of them."""
    return {place.name: place.spec for place in row.parts} or row.inputs


def batch_of(row):
    """One tensor: images or sounds, ids and mask of texts as the rows of one array, or samples of several parts."""
    draw = torch.Generator().manual_seed(SEED)
    if row.parts:
        return samples_of(row.parts, draw)
    if not row.names:
        return torch.randn(ROWS, *row.inputs[0].shape, generator=draw)
    return torch.stack(text_of(draw), dim=1)


def samples_of(parts, draw):
    """Each sample's inputs in one array, as the parts of a job's samples lie."""
    rows = np.zeros((ROWS, parts[-1].end), np.int64)
    given = dict(zip((IDS, MASK), text_of(draw), strict=True))
    for place in parts:
        batch = given.get(place.name)
        batch = torch.randn(ROWS, *place.spec.shape, generator=draw) if batch is None else batch
        for row, sample in zip(rows, batch.numpy(), strict=True):
            place.within(row)[...] = sample
    return torch.from_numpy(rows)


def text_of(draw):
    """Token ids and mask."""
    ids = torch.randint(3, WORDS, (ROWS, TOKENS), generator=draw)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (ROWS, 1), generator=draw)
    mask = (torch.arange(TOKENS) < lengths).long()
    return [ids * mask, mask]


def as_a_job_calls(row, model):
    """The network as it is called with one tensor."""
    if row.parts:
        return takes_parts(model, row.parts)
    return takes_rows(model, row.names) if row.names else model


def measured(row, dtype):
    """What the table says of a network, in one dtype."""
    started = time.perf_counter()
    try:
        found = cut_and_compared(row, dtype)
    except (*UNFIT, FrostlineError, ImportError) as error:
        found = {"failure": str(error).strip().partition("\n")[0] or type(error).__name__}
    return {"network": row.title, "until": row.until, "dtype": dtype, **found, "seconds": time.perf_counter() - started}


def cut_and_compared(row, dtype):
    model, batch = made(row, dtype), batch_of(row)
    plain, counted_on = copy.deepcopy(model), copy.deepcopy(model)
    is_packed = row.names or row.parts
    inputs = (TensorSpec(tuple(batch.shape[1:]), "int64"),) if is_packed else row.inputs
    network, whole = cut_network(as_a_job_calls(row, model), inputs), as_a_job_calls(row, plain)
    about = {
        "cuts": len(network.cuts),
        "frost_line": network.frost_line.name,
        "bytes": network.frost_line.bytes_per_sample,
        "input_bytes": network.cuts[1].bytes_per_sample,
        "fallback": network.fallback,
    }
    if network.prefix is None:
        return {**about, "failure": network.fallback}
    prefix = read_prefix(write_prefix(network.prefix))
    leaves = leaf_values(prefix.graph, prefix.tensors)
    with torch.no_grad():
        features = Runner(prefix.graph).run([batch], leaves)
    frozen, all_of_it = operations_of(row, counted_on, as_a_job_calls(row, counted_on), batch)
    shipped = counted(lambda: Runner(prefix.graph).run([batch], leaves))
    trained = step(model, network.head, features), step(plain, whole, cast_inputs(plain, [batch]))
    network.head.eval()
    plain.eval()
    with torch.no_grad():
        judged = [float_leaves(network.head(*features)), float_leaves(whole(*cast_inputs(plain, [batch])))]
    return {
        **about,
        "frozen_behind": max(0.0, 1 - shipped / frozen) if frozen else 0.0,
        "shipped": shipped / all_of_it,
        "train_difference": difference(*(outputs for outputs, _ in trained)),
        "gradient_difference": difference(*(gradients for _, gradients in trained)),
        "eval_difference": difference(*judged),
        "gradients": len(trained[0][1]),
    }


def step(model, run, inputs):
    """Outputs in train mode, and the gradients of what is trained."""
    model.zero_grad()
    torch.manual_seed(SEED)
    np.random.seed(SEED)  # the generator that transformers masks sounds by
    outputs = float_leaves(run(*inputs))
    sum(output.float().square().mean() for output in outputs if output.requires_grad).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return [output.detach() for output in outputs], [gradient for gradient in gradients if gradient is not None]


def float_leaves(output):
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def difference(ours, theirs):
    """The largest difference of two lists of tensors, relative to the largest number of each; 0 is to the bit."""
    assert len(ours) == len(theirs) > 0, f"{len(ours)} tensors where there are {len(theirs)}"
    return max(map(apart, ours, theirs))


def apart(our, their):
    assert our.shape == their.shape, f"{list(our.shape)} where it is {list(their.shape)}"
    assert torch.isfinite(their).all(), "the network itself gives no finite numbers"
    if torch.equal(our, their):
        return 0.0
    return float((our.double() - their.double()).abs().max() / their.double().abs().max())


def operations_of(row, plain, whole, batch):
    """Of the frozen layers, up to the end of the last one, and of the whole network."""
    if "+" in row.until:
        return operations_of_frozen_modules(plain, whole, batch)
    counter, reached = FlopCounterMode(display=False), []
    paths = dict(plain.named_modules())
    last = next((path for path in paths if f".{path}".endswith(f".{row.until}")), None)

    def note(*_):
        reached.append(counter.get_total_flops())

    if last is None:  # all but the classifier
        last, _ = classifier_of(plain, used_parameters(plain, frozen_by(row)))
        paths[last].register_forward_pre_hook(note)
    else:
        paths[last].register_forward_hook(note)
    with taken_apart(), torch.no_grad(), counter:
        whole(*cast_inputs(plain, [batch]))
    return reached[-1], counter.get_total_flops()


def operations_of_frozen_modules(plain, whole, batch):
    """Of several encoders, between whose frozen layers others run, and of the whole network."""
    counter, marks = FlopCounterMode(display=False), []

    def note(*_):
        marks.append(counter.get_total_flops())

    for _, module in frozen_modules(plain):
        module.register_forward_pre_hook(note)
        module.register_forward_hook(note)
    with taken_apart(), torch.no_grad(), counter:
        whole(*cast_inputs(plain, [batch]))
    return sum(marks[1::2]) - sum(marks[::2]), counter.get_total_flops()


def counted(run):
    with taken_apart(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@contextmanager
def taken_apart():
    """Without fused attention and fused layers, which count as no operations."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


BEGIN, END = "<!-- benchmarks/network_table.py -->\n", "<!-- end of the table -->\n"
COLUMNS = ("network", "frozen up to", "cuts", "frost line", "frozen work behind it", "bytes there, of its input's")
ALIGNED = ("---", "---", "---:", "---", "---:", "---:")


def table(found):
    """One row a network: its figures in the first dtype, and how equal it is in each."""
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in found)]
    rows = [f"| {' | '.join((*COLUMNS, *dtypes))} |", f"| {' | '.join((*ALIGNED, *('---' for _ in dtypes)))} |"]
    notes = []
    for name, until in dict.fromkeys((row["network"], row["until"]) for row in found):
        by_dtype = {row["dtype"]: row for row in found if (row["network"], row["until"]) == (name, until)}
        shown = next(iter(by_dtype.values()))
        reasons = [row.get("failure") or row.get("fallback") for row in by_dtype.values()]
        reason = next(filter(None, reasons), "")
        mark = ""
        if reason:
            notes.append(f"{len(notes) + 1}. {name}: {reason}.")
            mark = f" ({len(notes)})"
        cells = [f"{name}{mark}", f"`{until}`", *figures(shown), *(equal(by_dtype.get(dtype)) for dtype in dtypes)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n\n" + "\n".join(notes) + "\n"


def figures(row):
    if "failure" in row:
        return ["", "", "", ""]
    share = row["bytes"] / row["input_bytes"]
    return [
        str(row["cuts"]),
        f"`{row['frost_line']}`",
        f"{row['frozen_behind']:.0%}",
        f"{row['bytes']:,} ({share:.0%})" if share < 10 else f"{row['bytes']:,} ({share:.0f} times)",
    ]


def equal(row):
    if row is None:
        return ""
    if "failure" in row:
        return "fails"
    largest = max(row[f"{kind}_difference"] for kind in ("train", "gradient", "eval"))
    return "to the bit" if largest == 0 else f"{largest:.0e}"


def with_table(page, found):
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table(found) + "\n" + END + rest.partition(END)[2]


QUICK = {"networks": "resnet18", "dtypes": "float32"}


def options(parser):
    parser.add_argument("--networks", help="names with commas between them, put into the rows of --from")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--from", dest="measured", type=Path, metavar="FILE.json", help="measured before")
    parser.add_argument("--page", type=Path)


def measure(wanted):
    torch.set_num_threads(1)
    before = rows_of(wanted.measured) if wanted.measured else []
    if not wanted.measured or wanted.networks:
        before = merged(before, list(measurements(wanted)))
    if wanted.page:
        wanted.page.write_text(with_table(wanted.page.read_text(), before))
    return {"networks": before}


def rows_of(path):
    found = json.loads(path.read_text())
    return found.get("figures", found)["networks"]


def summary(found):
    failures = [row for row in found["networks"] if "failure" in row]
    return f"{table(found['networks'])}\n{len(found['networks'])} measured, {len(failures)} of them failed."


def merged(before, found):
    """Rows that were measured before, with those that were measured now, in the order of the table."""
    rows = {(row["network"], row["until"], row["dtype"]): row for row in [*before, *found]}
    order = [(row.title, row.until, dtype) for row in NETWORKS for dtype in DTYPES]
    return [rows[key] for key in order if key in rows]


def measurements(wanted):
    """Rows in the order of the table; traces are made anew, in a cache folder of their own."""
    chosen = wanted.networks.split(",") if wanted.networks else [row.name for row in NETWORKS]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["XDG_CACHE_HOME"] = folder
        for row in NETWORKS:
            for dtype in wanted.dtypes.split(",") if row.name in chosen else ():
                found = measured(row, dtype)
                print(f"{found['network']}, {dtype}: {equal(found)}, {found['seconds']:.1f} s", flush=True)
                yield found
                gc.collect()


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=summary, data=False)
