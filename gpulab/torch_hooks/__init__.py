"""The ways in which torch is patched for the length of a run, and put back."""
