"""Where a thread stands in the user's code, read by another process: what the thread does cannot sway the answer."""
