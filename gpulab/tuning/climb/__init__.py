"""Knob after knob: try the best cure, keep what is faster for certain."""
