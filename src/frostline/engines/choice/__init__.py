"""Which engine runs a prefix: prospects, trials and the choice between them."""
