"""The verb ``ingest``: copy a data set into another format or store, or keep its images as a network takes them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from frostline.cli.options import (
    as_json,
    changed_option,
    command,
    file_column_option,
    label_option,
    list_option,
    where_option,
)
from frostline.cli.show import ProgressBar, on_ray, print_json, say
from frostline.cli.units import BYTES
from frostline.core.declared import parse_json
from frostline.core.errors import SettingError
from frostline.core.units import in_bytes, in_seconds
from frostline.preprocess import PRESETS, Applied, CenterCrop, Decode, Normalize, Preprocess, Resize

if TYPE_CHECKING:
    from frostline.datasets import Dataset
    from frostline.datasets.copy.parts import CopyResult, PartRunner

__all__ = ("FORMS", "ingest")

FORMS = ("ready", "original", "parquet", "webdataset", "cql")
"""Written out, because what packs them takes long to import."""


@command(epilog="Example: frostline ingest photos/ ready/ --format ready --preprocess imagenet:224")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DEST")
@click.option(
    "--format",
    type=click.Choice(FORMS),
    default="ready",
    show_default=True,
    help="Format of the copy: ready (decoded pixels), original (class folders), parquet, webdataset (tar shards) or cql"
    " (table rows).",
)
@click.option(
    "--from",
    "source_format",
    metavar="FORMAT",
    help="Format of SRC, if it has files of several formats: folders, masks, webdataset, parquet, arrow, urls, cql or "
    "tar.gz.",
)
@where_option
@click.option(
    "--resize",
    type=int,
    metavar="N",
    help="Scale images so that the shorter side has N pixels; from a ready format, take the central N x N pixels.",
)
@click.option(
    "--preprocess",
    metavar="FILE|PRESET",
    help="Preprocessing that jobs on a ready format will declare: imagenet:SIDE, efficientnet_lite:SIDE or JSON. "
    "Copying a ready format unchanged needs neither this nor --resize.",
)
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "fp16"]),
    default="uint8",
    show_default=True,
    help="Numbers in a ready format: uint8 pixels, which give the same features bit for bit, or fp16 network inputs, "
    "which are rounded.",
)
@click.option(
    "--object-size",
    type=BYTES,
    default="64MiB",
    show_default=True,
    help="Size of one object of the copy; also the amount that is copied at once.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=16, show_default=True, help="Number of samples read at once."
)
@file_column_option
@label_option
@list_option
@changed_option
@click.option(
    "--max-skipped-fraction",
    default=0.01,
    show_default=True,
    metavar="SHARE",
    help="Share of the samples that may be unreadable before the copy stops.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read all of an existing copy and repair what is damaged; without this only objects whose size, version or "
    "checksum changed are repaired.",
)
@click.option(
    "--executor",
    type=click.Choice(("ray",)),
    help="Make the parts of the copy in Ray tasks, each with --workers readers, on the cluster of RAY_ADDRESS or "
    "frostline cluster up.",
)
@as_json
def ingest(
    source: str,
    destination: str,
    *,
    format: str,
    source_format: str | None,
    file_column: str | None,
    label: str | None,
    relist: bool,
    on_change: str,
    where: str | None,
    executor: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Copy a data set into another format or store.

    The source may have any format and be in any store that Frostline reads. With --format ready every image is
    decoded, scaled and cropped once, and jobs on DEST read the pixels without decoding. They declare the same
    preprocessing as on SRC and get the same pixels, bit for bit. The other formats keep the encoded images; pixels of
    a ready format are written as PNG. Labels, masks and metadata are copied too. After a kill the same command
    continues.
    """
    from frostline.datasets import Dataset

    if executor and any(url.startswith("memory://") for url in (source, destination)):
        raise SettingError("memory:// is that of one process, and tasks of Ray are others: name a folder or a store")
    data = Dataset(
        source, format=source_format, file_column=file_column, label=label, relist=relist, on_change=on_change
    )
    data = data if where is None else data.select(where)
    if format == "ready":
        _ready(data, destination, executor, as_json=as_json, **options)
    else:
        _keep_encoded(data, destination, format, executor, as_json=as_json, **options)


@contextmanager
def _working(executor: str | None) -> Iterator[dict[str, Any]]:
    """Show progress meanwhile; give whom to tell of it, and who makes the parts."""
    with on_ray() if executor else nullcontext() as ray, ProgressBar() as progress:
        yield {"on_event": progress, **({} if ray is None else {"runner": _by(ray)})}


def _by(ray: Any) -> "PartRunner":
    from frostline.ray.tasks import ray_runner

    return ray_runner(ray)


def _ready(
    source: "Dataset", destination: str, executor: str | None, *, as_json: bool, workers: int, **options: Any
) -> None:
    from frostline.datasets.copy.ready import ingest as run

    applied = _applied(source, options["resize"], options["preprocess"], options["dtype"])
    with _working(executor) as shown:
        done = run(
            source,
            destination,
            applied,
            object_bytes=options["object_size"],
            workers=workers,
            max_skipped_fraction=options["max_skipped_fraction"],
            verify=options["verify"],
            **shown,
        )
    if as_json:
        print_json({**done.to_json(), "applied": applied.to_json()})
        return
    _say(done, f"in {_objects(done.objects)}, ", f"{_objects(done.made)} made now")
    say(f"applied: {applied}")


def _keep_encoded(
    source: "Dataset",
    destination: str,
    format: str,
    executor: str | None,
    *,
    as_json: bool,
    resize: int | None,
    object_size: int,
    preprocess: str | None,
    dtype: str,
    **options: Any,
) -> None:
    from frostline.datasets.copy.cql import put_into_table
    from frostline.datasets.copy.repack import repack

    if preprocess is not None or dtype != "uint8":
        raise SettingError(f"--preprocess and --dtype are for --format ready; {format} keeps encoded images")
    where = ""
    done: CopyResult
    with _working(executor) as shown:
        if format == "cql":
            done = put_into_table(source, destination, shorter_side=resize, **options, **shown)
            made = f"{done.made} rows written now"
        else:
            done = repacked = repack(
                source, destination, format, shorter_side=resize, part_bytes=object_size, **options, **shown
            )
            where, made = f"in {_objects(repacked.objects)}, ", f"{done.made} of {repacked.parts} parts copied now"
    if as_json:
        print_json(done.to_json())
    else:
        _say(done, where, made)


def _objects(count: int) -> str:
    return f"{count} object{'' if count == 1 else 's'}"


def _say(done: "CopyResult", where: str, made: str) -> None:
    say(
        f"{done.samples} samples {where}{in_bytes(done.nbytes)} in all, at {done.url}; "
        f"{made}, in {in_seconds(done.seconds)}; {len(done.skipped)} skipped"
    )


def _applied(source: "Dataset", resize: int | None, preprocess: str | None, dtype: Literal["uint8", "fp16"]) -> Applied:
    if resize is None and preprocess is None and dtype == "uint8" and (kept := source.manifest.applied) is not None:
        return kept
    if (resize is None) == (preprocess is None):
        raise SettingError("say what to apply: either --resize N or --preprocess FILE, such as imagenet:224")
    if preprocess is not None:
        return Applied.to(_declared(preprocess), dtype)
    if dtype != "uint8":
        raise SettingError("--dtype fp16 keeps what a network takes: give its --preprocess, not --resize")
    assert resize is not None
    plain = Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)
    return Applied.to(Preprocess(steps=(Decode(), Resize(resize), CenterCrop(resize), plain)), dtype)


def _declared(name: str) -> Preprocess:
    preset, _, side = name.partition(":")
    if preset in PRESETS and side.isdecimal():
        return PRESETS[preset](int(side))
    try:
        value = parse_json(Path(name).read_text())
    except (OSError, UnicodeDecodeError) as error:
        presets = ", ".join(f"{preset}:SIDE" for preset in PRESETS)
        raise SettingError(f"--preprocess {name}: no such file, and none of the presets {presets}") from error
    except ValueError as error:
        raise SettingError(f"--preprocess {name} is no JSON: {error}") from error
    return Preprocess.from_json(value)
