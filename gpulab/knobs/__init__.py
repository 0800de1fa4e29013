"""Interventions on an unmodified cell, each a context manager that restores the former state."""
