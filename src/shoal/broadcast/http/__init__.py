"""HTTP for shards: the file server, its limits, and the pooled client."""
