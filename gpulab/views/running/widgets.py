"""Closes a widget with the parts that ipywidgets gives it: one that stays open is kept for the kernel's whole life."""

from __future__ import annotations

from typing import Any


def close(widget: Any) -> None:
    """Close a widget and the two that ipywidgets gives it for its look."""
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if part is not None and hasattr(part, "close"):
            part.close()
    widget.close()
