"""Interventions on an unmodified cell, each a context manager that puts back what it found."""
