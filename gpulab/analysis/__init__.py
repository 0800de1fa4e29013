"""Pure functions of a Run: what its columns mean. No I/O, no torch, nothing is stored."""
