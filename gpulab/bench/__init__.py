"""The bench of one cell: turns its knobs, runs it, and shows what came of it."""
