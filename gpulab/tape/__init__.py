"""A run as a table of marks: hooks write them, and what they mean is read off them afterwards."""
