"""Ways to a node: HTTP and in-process."""
