"""One step from proposed batch to training: batches, screening, recalls, timing, and how long their files are kept."""
