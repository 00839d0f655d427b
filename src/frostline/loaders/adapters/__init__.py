"""Loaders for frameworks beside PyTorch."""
