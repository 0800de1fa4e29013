"""Golden answers: what gpulab says of stored runs, recorded traces and simulated loops, kept to be compared with."""
