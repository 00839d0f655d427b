"""The ready format: pixels that are kept decoded."""
