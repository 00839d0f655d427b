"""Features kept in an object store, which several nodes share."""
