"""Knobs of training in several ranks."""
