"""Shoal: decentralised, asynchronous reinforcement learning of language models on untrusted compute."""

__version__ = "0.1.0"
