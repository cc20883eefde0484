"""Environments that episodes meet: contract, processes, episodes, and those that come with the package."""
