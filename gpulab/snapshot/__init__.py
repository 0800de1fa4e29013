"""A training's state remembered and put back, so that the same cell can run again from the same start."""
