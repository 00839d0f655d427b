"""What a graph costs: operations, memory and time."""
