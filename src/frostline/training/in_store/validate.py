"""Decides whether a node's trainer takes an assignment: what it declares must hold, and a step must fit the memory."""

from frostline.batching import readable_bytes
from frostline.engines.measure.step_memory import dry_step
from frostline.errors import OverBudget, UnsafeArtifact
from frostline.jobs.in_store.assignment import Assignment
from frostline.models.cutting.portable import Mode

__all__ = ("check_assignment",)

# Python and torch, before they do anything.
_BASE_BYTES = 320 << 20
# Gradients, and the two moments of Adam; SGD keeps one and AdamW two.
_COPIES = {"adam": 3, "adamw": 3, "sgd": 2}


def check_assignment(assignment: Assignment, memory_bytes: int) -> None:
    """Do nothing if the head gives scores for what crosses the frost line, and a step of it fits the memory.

    It is run on shapes alone: nothing that it says of itself is believed, and nothing is made for it.

    Args:
        assignment: as it came.
        memory_bytes: that the trainer's process may have.

    Raises:
        UnsafeArtifact: The head does not do what it should.
        OverBudget: A step cannot fit.
    """
    head, recipe = assignment.head, assignment.recipe
    rows = min(recipe.batch_size, len(assignment.train))
    made = max(_made(assignment, mode, rows) for mode in (head.training, head.evaluation))
    weights = sum(tensor.nbytes for tensor in head.tensors.values())
    trained = sum(head.tensors[name].nbytes for name in head.trained)
    aside = sum(head.tensors[name].nbytes for name in head.returning) if recipe.epochs is None else 0
    needed = _BASE_BYTES + made + weights + aside + _COPIES[recipe.optimizer] * trained
    if needed > memory_bytes:
        raise OverBudget(
            f"a step of {rows} samples takes {readable_bytes(needed)}, and this node gives a training "
            f"{readable_bytes(memory_bytes)}: start it with more --training-memory, or train with smaller batches"
        )


def _made(assignment: Assignment, mode: Mode, rows: int) -> int:
    if max(mode.places) >= len(assignment.inputs):
        raise UnsafeArtifact("the head takes more than what crosses the frost line")
    inputs = [assignment.inputs[place] for place in mode.places]
    step = dry_step(mode.graph, assignment.head.tensors, inputs, rows)
    wanted = (rows, assignment.classes)
    if step.shape != wanted or step.dtype != "float32":
        raise UnsafeArtifact(f"the head must give float32 {list(wanted)}, and it gives {step.dtype} {list(step.shape)}")
    return step.nbytes
