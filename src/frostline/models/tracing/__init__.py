"""Tracing a network into a graph, and keeping the trace."""
