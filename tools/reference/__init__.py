"""Writes the generated pages of docs/reference/ and the generated tables in other pages, from the code and the stored results."""
