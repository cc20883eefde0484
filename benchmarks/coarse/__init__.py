"""Parts of benchmarks/detection_bf16.py: models and workers, their draws, what the sequential test makes of them."""
