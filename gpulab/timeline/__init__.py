"""Analyses of a Timeline alone: the meaning of spans, launches, steps, memory. Its makers and its readers use them."""
