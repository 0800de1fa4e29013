"""What is read while a run goes on: GPU, memory, alerts."""
