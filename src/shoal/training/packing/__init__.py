"""From groups of samples to packed micro-batches."""
