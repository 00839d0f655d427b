"""Dealers for the prefetcher's tests."""

from frostline.core import Route
from frostline.prefetch import WeightedRoutes


def one_way(per_request, bytes_per_sample, cut=3):
    """Everything takes one way."""
    return WeightedRoutes(
        {Route(cut): 1.0}, samples_per_request=per_request, bytes_per_sample=lambda _: bytes_per_sample
    )
