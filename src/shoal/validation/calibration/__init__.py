"""Limits of the audit: measured on honest runs, tested on forgeries."""
