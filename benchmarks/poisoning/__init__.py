"""Parts of benchmarks/poison.py: policy versions, forged groups, careers of hostile keys, poisoned trainings."""
