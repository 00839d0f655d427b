"""The verb ``doctor``: examine a set-up and say what to change."""

import os

import click

from frostline.cli.options import as_json, command, file_column_option, format_option, label_option
from frostline.cli.show import DONE, MISTAKEN, ProgressBar, print_json, say
from frostline.core.errors import SettingError
from frostline.doctor import FINE, PROBLEM, WARNING, ExaminedSetup, Finding, examine, worst_level
from frostline.stores.protocols import RETRY_FOR, TIMEOUT
from frostline.training.settings import JobSettings

__all__ = ("doctor",)

_SIGNS = {FINE: ("ok", "green"), WARNING: ("look", "yellow"), PROBLEM: ("MEND", "red")}
# A store that does not answer is to be said, not waited for as a job of hours would.
_HASTE = {RETRY_FOR: "5", TIMEOUT: "15"}


@command(epilog="Example: frostline doctor --data s3://photos --near http://store:7070 --model timm:resnet18")
@click.option("--data", metavar="URL", help="Folder or URL of the data.")
@format_option
@click.option("--column", metavar="NAME", help="Column of Parquet files that has the samples.")
@file_column_option
@label_option
@click.option("--targets", metavar="COLUMN", help="Column with the targets to learn, instead of classes.")
@click.option(
    "--near",
    multiple=True,
    metavar="URL",
    help="URL of a node beside the data, such as http://store-1:7070; may be repeated.",
)
@click.option(
    "--device", metavar="LIST", help="Devices that this machine should have, written as for serve: cuda:0,cuda:1."
)
@click.option(
    "--model",
    metavar="NAME",
    help="Network to train: torchvision:NAME, timm:NAME, hf:OWNER/NAME or package.module:factory.",
)
@click.option(
    "--until",
    default="features",
    show_default=True,
    metavar="LAYER",
    help="Last frozen module of --model, such as layer3, or 'features' for all but the classifier.",
)
@click.option(
    "--weights",
    metavar="FILE|random",
    help="safetensors file with the weights of --model, or 'random'; by default the pretrained ones.",
)
@click.option(
    "--tokenizer", metavar="FILE|hf:NAME", help="Tokenizer of a network that takes texts, written as for train."
)
@click.option(
    "--samples",
    metavar="KIND",
    help="Kind of the samples: images, sounds:SECONDS, waves:SECONDS or arrays:SHAPE; see train --help-all.",
)
@as_json
def doctor(
    data: str | None,
    format: str | None,
    column: str | None,
    file_column: str | None,
    label: str | None,
    targets: str | None,
    near: tuple[str, ...],
    device: str | None,
    model: str | None,
    until: str,
    weights: str | None,
    tokenizer: str | None,
    samples: str | None,
    as_json: bool,
) -> int:
    """Check machine, nodes, data, network and link before a job.

    It says what to change. Without options it checks this machine alone; --near adds nodes, --data the data, and
    --data with --model a short job that is measured. The exit code is 0 if a job can run, and 2 if something must be
    changed first.
    """
    if model is not None and data is None:
        raise SettingError("a network is examined on samples: name some (--data URL)")
    for name, seconds in _HASTE.items():
        os.environ.setdefault(name, seconds)
    job = None
    if data is not None:
        job = JobSettings(
            data=data,
            format=format,
            column=column,
            file_column=file_column,
            label=label,
            targets=targets,
            near=next(iter(near), None),
            also_near=near[1:],
            model=model or "",
            until=until,
            weights=weights,
            tokenizer=tokenizer,
            samples=samples,
        )
    findings = []
    with ProgressBar() as progress:
        subject = ExaminedSetup(nodes=near, data=job, has_network=model is not None, devices=device)
        for finding in examine(subject, progress):
            findings.append(finding)
            if not as_json:
                _print(finding)
    verdict = worst_level(findings)
    if as_json:
        print_json({"verdict": verdict, "findings": [finding.to_json() for finding in findings]})
    else:
        _print_verdict(findings)
    return MISTAKEN if verdict == PROBLEM else DONE


def _print(finding: Finding) -> None:
    sign, colour = _SIGNS[finding.level]
    say(f"  {finding.part}: {finding.says}", sign=click.style(f"{sign:>4}", fg=colour))
    if finding.mend is not None:
        say(f"      -> {finding.mend}")


def _print_verdict(findings: list[Finding]) -> None:
    problems, warnings = (sum(finding.level == level for finding in findings) for level in (PROBLEM, WARNING))
    if problems:
        say(f"{problems} of {len(findings)} checks found something to change before a job can run")
    else:
        say(f"a job can run{f'; {warnings} of {len(findings)} checks found something to look at' if warnings else ''}")
