"""Options that several verbs share, so that one name means one thing."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ("BYTES", "as_json", "job_options", "node_options")

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


class _Bytes(click.ParamType[int]):
    """A number of bytes, such as 512MiB, 2G or 1000000."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(value), re.IGNORECASE)
        if match is None or match[2].lower() not in _UNITS:
            self.fail(f"{value!r} is no number of bytes; write it like 512MiB or 2GB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].lower()])


BYTES = _Bytes()

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result alone, as JSON, on stdout.")


def job_options(function: F) -> F:
    """What a job is about: data, model, frost line, node."""
    for option in reversed(
        (
            click.option(
                "--data", required=True, metavar="URL", help="Folder or s3:// prefix of images in class folders."
            ),
            click.option(
                "--model",
                required=True,
                metavar="NAME",
                help="torchvision:NAME, timm:NAME, package.module:factory or demo:efficientnet_lite0.",
            ),
            click.option(
                "--until",
                required=True,
                metavar="LAYER",
                help="Last frozen module, or 'features': all but the classifier.",
            ),
            click.option("--near", metavar="URL", help="Node beside the data; without it one is started for the job."),
            click.option("--weights", metavar="FILE", help="safetensors file of the whole network's state_dict."),
            click.option(
                "--seed", default=0, show_default=True, help="Of order, split, fresh layers and augmentation."
            ),
            click.option("--cut", type=int, metavar="N", help="Use this cut instead of the planned one (see: plan)."),
            click.option(
                "--skip-allowance",
                default=0.01,
                show_default=True,
                metavar="SHARE",
                help="Share of the samples that may be unreadable.",
            ),
        )
    ):
        function = option(function)
    return function


def node_options(function: F) -> F:
    """What a node may use."""
    for option in reversed(
        (
            click.option("--memory", type=BYTES, default="2GiB", show_default=True, help="The node's memory budget."),
            click.option("--device", default="cpu", show_default=True, help="Where the node runs networks."),
        )
    ):
        function = option(function)
    return function
