"""The report of a run: text, page, picture, data."""
