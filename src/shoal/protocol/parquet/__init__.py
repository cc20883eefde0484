"""A strict reader for the part of parquet that rollout files use."""
