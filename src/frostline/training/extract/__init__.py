"""Extracting the features of a whole data set into files."""
