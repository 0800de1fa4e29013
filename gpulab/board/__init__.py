"""The board of a class: learners and exercises, who is stuck, guesses next to measurements.

`%gpulab board FOLDER` shows it in the instructor's notebook; `python -m gpulab.board` is a service of JupyterHub for
classes without a shared folder.
"""
