"""The functions that users call, by `import gpulab`, the magics and the command line."""
