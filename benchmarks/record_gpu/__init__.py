"""Recordings for the lessons: real cells, run on a GPU under gpulab, kept as whole runs small enough to ship.

`python -m benchmarks.record_gpu --out FOLDER` makes the whole set in at most ten minutes; called again it makes what is
missing. `--collect FOLDER` puts the set where `gpulab.recordings` finds it. Each cell runs in a process of its own with
a time limit, and needs neither IPython nor a network.
"""
