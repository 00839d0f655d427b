"""Lets a torchvision built for CUDA be imported beside a torch built without it.

The wheel of the package index registers fake kernels for operators that only its compiled part declares, and that
part does not load without CUDA. Declaring the two operators first lets the import through: models and transforms
work, detection operators and torchvision's own decoders do not. A user has a matching pair and needs none of this.

Python imports a module of this name when it starts, so a folder on PYTHONPATH brings it to subprocesses too.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclaredBeforeTorchvision(MetaPathFinder):
    """Finds nothing itself: it is asked before torchvision is imported, and uses the moment."""

    def __init__(self):
        self.library = None  # the declarations live as long as this

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None and is_mismatched(path):
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in OPERATORS:
                self.library.define(operator)


def is_mismatched(path):
    import torch

    spec = PathFinder.find_spec("torchvision", path)
    if spec is None or spec.origin is None:
        return False
    built_for_cuda = "+cu" in Path(spec.origin).with_name("version.py").read_text()
    return built_for_cuda and torch.version.cuda is None


if not any(type(finder).__name__ == DeclaredBeforeTorchvision.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, DeclaredBeforeTorchvision())
