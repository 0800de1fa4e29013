"""What can be wrong with a run, by subject; `catalogue` lists the modules."""
