"""The page of a run: its files, the answers that feed it, the owner's session and the stream of events."""
