"""The coordinator's rules over tables in memory: the same decisions as the store makes, fast enough for ten thousand workers."""
