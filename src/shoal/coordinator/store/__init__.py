"""The database of the coordinator: schema, connections, one writer thread."""
