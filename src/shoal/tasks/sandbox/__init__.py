"""Runs untrusted programs inside bubblewrap."""
