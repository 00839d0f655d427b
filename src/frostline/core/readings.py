"""How the bytes at a sample's address are found: the names that travel in requests."""

__all__ = ("CELLS", "OBJECTS", "READINGS", "URLS", "read_as")

OBJECTS = "objects"
"""Bytes from ``offset`` of an object."""
CELLS = "cells"
"""A cell of a Parquet file: the object names file and column, the offset is the row."""
URLS = "urls"
"""The object is a URL of its own, within a root that the node serves."""
READINGS = (OBJECTS, CELLS, URLS)


def read_as(url: str, reading: str) -> str:
    """What stands for a data set in the names of kept features: the same address is other bytes in another reading."""
    return url if reading == OBJECTS else f"{reading} of {url}"
