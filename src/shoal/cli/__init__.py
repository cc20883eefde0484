"""The `shoal` command: parsing and printing. Heavy imports happen inside the commands."""
