"""The trained model: log-probabilities, attention over packed rows, sharding, master weights."""
