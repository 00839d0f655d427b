"""Engines: run a graph."""
