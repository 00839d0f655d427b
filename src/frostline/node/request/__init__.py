"""One request at the node: validated, read, decoded, computed and packed."""
