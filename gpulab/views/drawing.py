"""What the lessons' figures share: matplotlib's defaults for their length, and text that is shown as it is."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from gpulab.views.wording import plain

FONT = "DejaVu Sans"  # comes with matplotlib, so that the picture is the same everywhere
GREY = "#555555"
_UNKNOWN_GLYPH = "\u25a1"


@contextmanager
def own_style() -> Iterator[None]:
    """Draw with matplotlib's defaults, whatever style the user has set, and put theirs back."""
    import matplotlib as mpl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpl.MatplotlibDeprecationWarning)
        defaults = {k: v for k, v in mpl.rcParamsDefault.items() if not k.startswith("backend")}
        with mpl.rc_context(defaults):
            yield


def ink(text: str) -> str:
    """Text as matplotlib shall draw it: no formula between dollar signs, no control character, no missing glyph."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(FONT))
    glyphs = (c if font.get_char_index(ord(c)) else _UNKNOWN_GLYPH for c in plain(text))
    return "".join(glyphs).replace("$", r"\$")


def ink_lines(text: str, width: int, most: int) -> list[str]:
    """Text wrapped to at most `most` lines of `width` characters; what does not fit is shown by an ellipsis."""
    return [ink(line) for line in textwrap.wrap(plain(text), width, max_lines=most, placeholder=" …")]
