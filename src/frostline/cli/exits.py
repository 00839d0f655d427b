"""The exit codes of every verb, so that one number means one thing."""

__all__ = ("DONE", "FAILED", "INTERRUPTED", "MISTAKEN")

DONE = 0
FAILED = 1
MISTAKEN = 2
"""The user can put it right."""
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
