"""Measures one execution: step hooks, sampling process, profiler window. Reports to a monitor, depends on no view."""
