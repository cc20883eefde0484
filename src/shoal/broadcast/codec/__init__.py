"""Bit-exact, compressed differences between two versions of a model."""
