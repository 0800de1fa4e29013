"""Run the same cell again with one thing changed, and compare."""
