"""Several processes from one command: what they run, and PyTorch's launcher that starts them."""
