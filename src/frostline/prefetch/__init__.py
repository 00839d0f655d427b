"""The window and its driver: what to ask for now, what may be handed out."""

from frostline.prefetch.driver import Fetch, Prefetcher, Tuner
from frostline.prefetch.owned_requests import OwnedRequests, RowOwners
from frostline.prefetch.requests import (
    Ask,
    BatchAssembler,
    Delivery,
    Gathered,
    NextRequest,
    PlannedRequest,
    RequestSource,
    RowRange,
    ShortestWait,
    WeightedRoutes,
    plan_requests,
)
from frostline.prefetch.window import Window, WindowStatistics

__all__ = (
    "Ask",
    "BatchAssembler",
    "Delivery",
    "Fetch",
    "Gathered",
    "NextRequest",
    "OwnedRequests",
    "PlannedRequest",
    "Prefetcher",
    "RequestSource",
    "RowOwners",
    "RowRange",
    "ShortestWait",
    "Tuner",
    "WeightedRoutes",
    "Window",
    "WindowStatistics",
    "plan_requests",
)
