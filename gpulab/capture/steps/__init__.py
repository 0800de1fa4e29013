"""Where the steps of a training loop are found, and when the profiler's window opens."""
