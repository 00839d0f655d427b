"""What every store has in common."""
