"""What a comparison says: pure functions of its record."""
