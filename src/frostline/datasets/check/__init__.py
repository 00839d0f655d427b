"""Reading every sample of a data set once, to find those that are broken."""
