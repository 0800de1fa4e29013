"""One measured execution: step hooks, sampling process, profiler window. Tells a monitor, knows no view."""
