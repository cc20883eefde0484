"""One module per process of a run: builds the role from a run directory or an address and runs it until it ends."""
