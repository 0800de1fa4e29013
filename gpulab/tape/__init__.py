"""Holds a run as a table of marks: hooks write the marks, and steps are read from them afterwards."""
