"""Prefixes as files of data alone."""
