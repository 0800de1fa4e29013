"""Saves and restores the state of a training, so that the same cell can run again from the same start."""
