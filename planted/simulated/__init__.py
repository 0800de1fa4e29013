"""A model of one training process and one GPU: it plays a loop, records what a profiler would, and knows the truth."""
