"""What gpulab itself costs, measured; results with machine and versions lie in `results/`."""
