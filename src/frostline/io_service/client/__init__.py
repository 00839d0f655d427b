"""The way from a training process to the I/O service of its machine."""
