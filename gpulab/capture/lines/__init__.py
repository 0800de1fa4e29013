"""Which line of the user's code takes the time, and which function it calls."""
