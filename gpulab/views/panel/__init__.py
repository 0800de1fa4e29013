"""The panel under a report: every knob of the cell, and the buttons."""
