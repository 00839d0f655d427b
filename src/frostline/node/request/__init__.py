"""One request at the node: it is validated, read, decoded, computed and packed."""
