"""What a change would bring, told before it is tried: replay of the measured window, and formulas where it ends."""
