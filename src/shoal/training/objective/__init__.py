"""What is optimised: advantages, losses, off-policy corrections, and user functions by name."""
