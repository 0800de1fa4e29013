"""A few words in a coloured frame, as text and as HTML that untrusted notebooks keep: inline styles, no scripts."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Literal

Tone = Literal["neutral", "good", "bad"]

_COLOURS: dict[Tone, str] = {"neutral": "#5B6B7F", "good": "#1E7B45", "bad": "#B3541E"}


@dataclass(frozen=True, slots=True)
class Note:
    """What a lesson says to its reader: an opening and what follows it."""

    opening: str
    words: str
    tone: Tone = "neutral"

    def __repr__(self) -> str:
        return f"{self.opening} {self.words}"

    def _repr_html_(self) -> str:
        """Colours that stand on light and dark pages: only the frame and the opening have one of their own."""
        colour = _COLOURS[self.tone]
        frame = f"border-left:4px solid {colour};padding:6px 12px;margin:4px 0;max-width:60em"
        opening = f"background:{colour};color:#FFFFFF;border-radius:3px;padding:1px 7px;margin-right:6px"
        return (
            f'<div style="{frame}"><b style="{opening}">{html.escape(self.opening)}</b>{html.escape(self.words)}</div>'
        )
