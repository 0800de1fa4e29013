"""What a Timeline says by itself: which spans mean what, launches, steps, memory. Pure; makers and readers use it."""
