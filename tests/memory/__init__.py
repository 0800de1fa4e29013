"""Tests of the package that finds live tensors and their owners."""
