"""Read the world into records: profiler results, meters, the machine, the run store."""
