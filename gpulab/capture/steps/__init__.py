"""What else is learned of each step: its losses, what the model is given, updates by hand."""
