"""Functions that compute figures from a Run, without I/O, torch or stored state."""
