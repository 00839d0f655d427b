"""Copying a data set into another format or store."""
