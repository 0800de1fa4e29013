"""What a comparison says: pure functions of the records in `gpulab.comparison`."""
