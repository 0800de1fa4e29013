"""Planted truth: trainings whose bottleneck is known beforehand. `README.md` says what lies where; `judge` compares."""
