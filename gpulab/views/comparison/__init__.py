"""Two runs, or many, side by side."""
