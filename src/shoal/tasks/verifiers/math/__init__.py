"""Answers to mathematics problems: read completely by one grammar, then compared by their kind."""
