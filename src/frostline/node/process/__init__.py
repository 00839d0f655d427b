"""The processes that a node starts, and how a node is started as a process."""
