"""The loader for PyTorch, and its worker processes."""
