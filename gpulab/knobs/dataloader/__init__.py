"""Knobs of the DataLoader."""
