"""The weights that a node holds."""
