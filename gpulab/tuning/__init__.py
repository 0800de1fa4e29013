"""Turn knobs: run the same cell again with one thing changed, and compare."""
