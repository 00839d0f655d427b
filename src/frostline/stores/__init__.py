"""Object stores: read, list and write bytes."""
