"""The owner's tools: make a run, control it, back it up, restore it, read its records."""
