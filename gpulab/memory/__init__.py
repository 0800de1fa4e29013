"""Finds the live tensors of this process, names who holds them, and lets them go."""
