"""Choosing samples of a data set by an expression."""
