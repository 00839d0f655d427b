"""Nodes as actors of Ray, which places them and starts them again; what is decided here is which there should be."""
