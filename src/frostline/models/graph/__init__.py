"""What follows from a traced graph: its dependencies, its frontiers and its cuts."""
