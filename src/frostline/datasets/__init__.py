"""Data sets: a manifest of samples over data that stays as it is."""
