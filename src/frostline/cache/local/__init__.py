"""Features kept by one process or machine: in memory and on disk."""
