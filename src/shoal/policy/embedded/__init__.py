"""The embedded engine: any Transformers causal LM in this process."""
