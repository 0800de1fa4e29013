"""What the training thread does besides training, and at which line of the user's."""
