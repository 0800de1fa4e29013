"""Predict the effect of a change before it is tried: by replay of the measured window, and by formulas beyond it."""
