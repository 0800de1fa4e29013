"""Trace files and profiler results as Runs."""
