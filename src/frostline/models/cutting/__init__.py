"""Cutting a network: its frozen part to ship, its head to train."""
