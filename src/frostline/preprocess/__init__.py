"""Preprocessing declared as data, with the same numbers on every side."""
