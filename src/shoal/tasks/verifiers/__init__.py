"""Verifiers: from a task and a completion to a reward and the reason for it."""
