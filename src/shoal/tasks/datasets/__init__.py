"""Task sets: from files, the hub or a generator to an Arrow table."""
