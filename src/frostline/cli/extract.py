"""The verb ``extract``: the features of a whole data set, to Parquet, safetensors or Lance."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from frostline.cli.monitoring.logs import log_format_option, progress, trace_option
from frostline.cli.options import as_json, job_options, policy_option
from frostline.cli.show import on_ray, print_json
from frostline.cli.units import BYTES
from frostline.core.units import in_bytes, in_seconds
from frostline.processors import collector_rests
from frostline.training.settings import ExtractSettings, JobSettings

__all__ = ("extract",)


@click.command(
    epilog="Example: frostline extract --data photos/ --model demo:efficientnet_lite0 --until features --out f.parquet"
)
@job_options
@policy_option
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=".parquet, .safetensors or .lance.",
)
@click.option("--part-size", type=BYTES, default="64MiB", show_default=True, help="Features kept at once meanwhile.")
@click.option(
    "--on",
    type=click.Choice(("ray",)),
    help="Have tasks of Ray ask the nodes, part by part; Ray is that of RAY_ADDRESS or frostline cluster up.",
)
@log_format_option
@trace_option
@as_json
def extract(job: JobSettings, out: Path, part_size: int, on: str | None, as_json: bool) -> None:
    """Write the features of every sample to a name that ends in .parquet, .safetensors or .lance.

    Parquet has the columns id, object, label, class, and features as a fixed-shape tensor; safetensors the tensors
    features, ids and labels; a Lance data set, which is a folder, has the columns of Parquet, with features as lists of
    one length. It appears when it is whole. Parts are kept beside it until then: after a kill, run the same again, and
    it goes on where it was. Over data that changed since, only samples that came or changed are computed, and the
    result is that of a run from scratch. With --near several times the nodes share the work.
    """
    from frostline.training.extract.feature_files import check_suffix
    from frostline.training.start import begin

    check_suffix(out)
    # Each sample comes once, so nothing is worth keeping.
    settings = ExtractSettings(
        job=replace(job, loader=replace(job.loader, cache_bytes=0)), out=out, part_bytes=part_size, on_ray=on == "ray"
    )
    ray = on_ray() if settings.on_ray else nullcontext()
    with ray, progress() as observe, begin(settings.job, observe) as begun:
        # Brings PyTorch, which the node imports at the same time.
        with collector_rests():
            from frostline.training.extract.extract import extract as run

        done = run(settings, observe, begun=begun, began_at=click.get_current_context().obj)
    if as_json:
        print_json(done.to_json())
        return
    click.echo(
        f"{done.samples} samples of {done.shape} {done.dtype} written to {out} in {in_seconds(done.seconds)}, "
        f"{in_seconds(done.setup_s)} of them set-up; "
        f"{in_bytes(done.wire_bytes)} crossed, {len(done.skipped)} skipped"
        f"; {done.computed} computed, {done.kept} kept"
        + (f", {done.taken_up} taken up from before" if done.taken_up else "")
        + f"; computed by {done.engine}"
        + (f", relative error up to {done.engine_error:.2g}" if done.engine_error else "")
        + (f"; relative error on the way up to {done.codec_error:.2g}" if done.codec_error else "")
    )
