"""Experiments on recurrence: critical lengths, loss against trained length, and a frame policy in the swarm."""
