"""The node over HTTP."""
