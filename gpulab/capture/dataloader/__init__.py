"""Where the DataLoader is timed, in the training process and in its workers."""
