"""The board of a class."""
