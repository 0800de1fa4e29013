"""The machine as it is: GPUs, host, memory, and the meters that read them."""
