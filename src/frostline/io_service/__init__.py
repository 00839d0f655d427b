"""The I/O service: what training processes of one machine share, so that the same samples are read once."""
