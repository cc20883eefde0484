"""Processes of one host: the supervisor, `shoal up` and `shoal demo`."""
