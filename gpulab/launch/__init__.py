"""Several processes from one command: what they run, and how PyTorch's launcher starts them."""
