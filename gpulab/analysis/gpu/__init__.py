"""What only a GPU's trace tells: kernels, copies, launches, matrix units."""
