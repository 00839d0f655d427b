"""Seeing what verbs and nodes do from outside: structured logs, and a live view of nodes."""
