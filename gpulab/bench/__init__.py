"""The bench of one cell: turns its knobs, runs it, and shows the results."""
