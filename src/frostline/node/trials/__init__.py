"""Trials of engines at the node."""
