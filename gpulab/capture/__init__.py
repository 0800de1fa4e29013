"""One measured execution: step hooks, sampling process, profiler window. Tells a watcher, knows no view."""
