"""A climb: its tries, its result."""
