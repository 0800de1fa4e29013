"""Knobs of the model, its optimizer and the back ends."""
