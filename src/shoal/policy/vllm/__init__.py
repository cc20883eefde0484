"""The same engine interface on vLLM."""
