"""Formats: the ways in which data lies in a store, each read in place."""
