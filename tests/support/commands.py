"""What a command answers to a line, as at a terminal or in a notebook, without either."""

from __future__ import annotations

from gpulab.arguments import HelpRequest, perform, split, text_of
from gpulab.commands import Door


def answered(line: str, door: Door = "notebook") -> str:
    """The text that is printed. Raises what the command raises."""
    try:
        return text_of(*perform(split(line, "%gpulab"), door))
    except HelpRequest as e:
        return f"{e}\n"
