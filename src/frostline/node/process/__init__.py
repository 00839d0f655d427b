"""The processes that a node starts and those that start nodes."""
