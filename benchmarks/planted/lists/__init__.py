"""The truth about the planted cells, by the side of the step that is sick."""
