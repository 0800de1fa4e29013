"""What the host did: operators, the DataLoader, the optimizer, lines of the user's code."""
