"""Deciding stays pure inside modules that also do: what these parts use of their module names nothing that acts.

Modules that decide alone are held by the contracts in ``pyproject.toml``; a contract sees modules, and not their parts.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "frostline"
ACTING = {"PIL", "anyio", "asyncio", "http", "obstore", "random", "socket", "subprocess", "threading", "time", "torch"}
"""Packages that do something, or say what changes by itself."""
PARTS = {
    "cache.disk": "ScopeUsage idle_scopes stored_bytes",
    "client.owners": "BlockOwners Blocks as_steps max_excess",
    "control.settings": "ControlSettings ControlTenant ControlledJob",
    "datasets.copy.layout": (
        "FolderNames CopySample Metadata OutputObject Packer divide_samples metadata_in packer_named say_what_is_left "
        "suffix_by_content"
    ),
    "datasets.formats.folders": (
        "ClassFolderFormat MaskPairs Pair is_image is_sample names_a_class pairs_of suffix_of"
    ),
    "datasets.formats.tables": (
        "ColumnRoles columns_by_input columns_in_text columns_of_schema is_label is_scalar "
        "label_texts roles_in roles_of_parts"
    ),
    "datasets.manifest": (
        "Changes JoinedRows as_chosen changes_elsewhere changes_in_words rows_at external_entries select_part "
        "refusal_of refusing_observer rows_of_ids within"
    ),
    "datasets.manifest_store": "History history_of history_text lies_beside prune_history",
    "datasets.selection": "parse_expression",
    "engines.protocols": (
        "Pixels calibration_of calibration_pixels evaluation_name evaluation_pixels identity levels_of offer_name"
    ),
    "io_service.rows": "InFlightBudget JobBytes",
    "node.trials.queue": "EngineMemory Requester TrialPolicy policy_of",
    "node.weights": "Evictable Incoming Key ResidentWeights WaitQueue Waiter to_evict",
    "preprocess.apply": "Applied steps_left",
    "preprocess.steps": (
        "CenterCrop ColorJitter Decode DecodeAudio Normalize RandomHorizontalFlip RandomResizedCrop "
        "RandomStep ReadArray Resize SoleStep Squeeze Step Stored Tokenize"
    ),
    "preprocess.tokens": "why_unbounded",
    "ray.tasks": "row_ranges",
    "stores.protocols": "LinkBounds StoreLimits Waits",
    "stores.reads": "Range RangePiece RangePlan plan_ranges",
    "training.run": "TrainValSplit in_words is_test sides_of",
    "training.what_if": "MeasuredSituation Question WhatIf WhatIfPlan answer relative_speed",
    "wire.codecs": "Codec offered_codecs offered_precisions",
    "wire.messages": (
        "Patch error_from_answer error_from_json error_from_line error_to_json fields_of_patch retry_after status_of"
    ),
    "wire.shared_memory": "Block RowBlock is_alike lay_out read_block row_bytes",
}
"""Names that decide, by the module that has them."""


def bound(statement):
    """Names that a statement of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}


def is_for_types(statement):
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def acting_imports(node):
    """Acting packages that are imported anywhere below a node."""
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names if alias.name.partition(".")[0] in ACTING)
        elif isinstance(found, ast.ImportFrom) and found.module.partition(".")[0] in ACTING:
            yield found.module


def used(statement):
    """Names of the module that a statement uses: not those that it binds itself."""
    nodes = list(ast.walk(statement))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - own


def acts(tree, names):
    """What some names of a module use that acts: the chain of names from them to an import."""
    statements = {
        name: statement for statement in tree.body if not is_for_types(statement) for name in bound(statement)
    }
    waiting, seen = [(name, (name,)) for name in names], set()
    while waiting:
        name, chain = waiting.pop()
        if name in seen or name not in statements:
            continue
        seen.add(name)
        yield from ((*chain, package) for package in acting_imports(statements[name]))
        waiting += [(other, (*chain, other)) for other in used(statements[name])]


@pytest.mark.parametrize("module", PARTS)
def test_the_deciding_parts_of_a_module_use_nothing_that_acts(module):
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    defined = set().union(*map(bound, tree.body))
    names = PARTS[module].split()
    assert set(names) <= defined, "what decides is still there"
    assert list(acts(tree, names)) == []


def test_a_part_that_acts_through_another_one_is_found():
    tree = ast.parse("import time\n\ndef now():\n    return time.time()\n\ndef decide():\n    return now()\n")
    assert list(acts(tree, ["decide"])) == [("decide", "now", "time", "time")]
