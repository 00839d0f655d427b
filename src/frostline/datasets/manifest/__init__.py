"""The manifest: the list of samples, how it is built, kept and compared."""
