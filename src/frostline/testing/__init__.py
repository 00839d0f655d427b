"""Doubles that are shipped: what a user's own tests may run against instead of a node."""

from frostline.testing.transports import Act, ScriptedTransport

__all__ = ("Act", "ScriptedTransport")
