"""HTTP connections to a node."""
