"""What a user calls: one function each, behind `import gpulab`, the magics and the command line."""
