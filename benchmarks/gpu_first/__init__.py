"""The first hour on a GPU: every claim of gpulab about one, set beside a truth of its own, in at most ten minutes.

`python -m benchmarks.gpu_first --out FOLDER`. Needs no notebook. Each part is a process with a time limit of its own;
what one part has measured is in FOLDER/results.json at once, whatever becomes of the next.
"""
