"""Extractions of a small network, for processes of their own too."""

from frostline.core.config import LoaderSettings, NodeSettings
from frostline.training.settings import ExtractSettings, JobSettings


def small_extraction(folder, out, near=None, *, part_bytes=1 << 20, model="Small", loader=None, **more):
    job = JobSettings(
        data=str(folder),
        model=f"support.networks:{model}",
        until="stem",
        near=near,
        loader=LoaderSettings(cache_bytes=0, **(loader or {})),
        node=NodeSettings(memory_bytes=512 << 20),
    )
    return ExtractSettings(job=job, out=out, part_bytes=part_bytes, **more)
