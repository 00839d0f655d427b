"""The verb ``plan``: measure every cut of a network on real samples, and show which one is chosen and why."""

import click

from frostline.cli.options import as_json, job_options, node_options
from frostline.cli.progress import ProgressBar
from frostline.cli.show import print_json, print_table
from frostline.config import LoaderSettings, NodeSettings
from frostline.training.words import in_bytes, in_seconds

__all__ = ("plan",)


@click.command(epilog="Example: frostline plan --data photos/ --model torchvision:resnet18 --until layer3")
@job_options
@node_options
@as_json
def plan(
    data: str,
    model: str,
    until: str,
    near: str | None,
    weights: str | None,
    seed: int,
    cut: int | None,
    skip_allowance: float,
    memory: int,
    device: str,
    as_json: bool,
) -> None:
    """Show the chosen cut and all others, with bytes, seconds and memory, and why.

    Everything is measured: the node runs the network on a few of the samples, and a few cross the link.
    """
    from frostline.training.setup import JobSettings, set_up

    settings = JobSettings(
        data=data,
        model=model,
        until=until,
        near=near,
        weights=weights,
        seed=seed,
        cut=cut,
        loader=LoaderSettings(skip_allowance=skip_allowance),
        node=NodeSettings(memory_bytes=memory, device=device),
    )
    with ProgressBar() as progress, set_up(settings, progress) as setup:
        chosen = setup.job.plan
    assert chosen is not None
    if as_json:
        print_json(chosen.to_json())
        return
    rows = [
        (
            "▸" if one.cut == chosen.cut else "",
            str(one.cut),
            one.name,
            in_bytes(one.wire_bytes_per_sample),
            in_seconds(one.store_s),
            in_seconds(one.trainer_s),
            in_bytes(one.memory_bytes),
            f"{one.samples_per_s:.0f}",
            one.rejected or "chosen",
        )
        for one in chosen.candidates
    ]
    print_table(
        f"{chosen.reason}.", ("", "cut", "after", "bytes", "node", "trainer", "node memory", "samples/s", "why"), rows
    )
    link = chosen.link
    click.echo(
        f"link: {in_bytes(link.bytes_per_s)}/s, round trip {in_seconds(link.round_trip_s)}; figures are per sample"
    )
