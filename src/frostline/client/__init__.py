"""Ways to nodes over HTTP: one node, or several that serve the same data."""
