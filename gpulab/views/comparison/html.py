"""A comparison as HTML: the page and the notebook tables of any report, and the edit to paste below them."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence

from gpulab.diagnosis.headline import Headline
from gpulab.views import html
from gpulab.views.comparison.sections import Keep
from gpulab.views.layout import Section

_BEFORE = '<div class="details">'
_CODE = (
    "margin:8px 0 0 0;padding:10px 14px;overflow-x:auto;font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;"
    "white-space:pre;border:1px solid rgba(128,128,128,0.35);border-radius:8px;background:rgba(128,128,128,0.08)"
)
_GROUNDS = {"+": "rgba(46,158,91,0.25)", "-": "rgba(217,83,79,0.25)"}  # under any ink, light or dark


def page(opening: str, headline: Headline, sections: Sequence[Section], png: bytes, keep: Keep | None) -> str:
    """A self-contained page: no request, no script, the picture inside, light and dark."""
    whole = html.page(opening, headline, sections, png)
    if keep is None:
        return whole
    assert whole.count(_BEFORE) == 1, "texts are escaped, so that this tag is ours alone"
    kept = f'<section><h2>Keep it</h2><p class="note">{markup.escape(keep.sentence)}</p>{_code(keep)}</section>'
    return whole.replace(_BEFORE, f"{kept}\n{_BEFORE}")


def fragment(headline: Headline, sections: Sequence[Section], keep: Keep | None) -> str:
    """Headline and tables for a notebook's output, with inline styles only."""
    shown = html.fragment(headline, sections)
    if keep is None:
        return shown
    sentence = f'<p style="margin:2px 0;font-size:13px;opacity:0.75">{markup.escape(keep.sentence)}</p>'
    return f'{shown}<div style="margin:10px 0 0"><b>Keep it</b>{sentence}{_code(keep)}</div>'


def _code(keep: Keep) -> str:
    lines = "\n".join(_line(line) for line in keep.code.split("\n"))
    return f'<pre style="{_CODE}">{lines}</pre>'


def _line(line: str) -> str:
    """One line of code; of a diff on the ground of what it adds or takes away."""
    ground = _GROUNDS.get(line[:1]) if not line.startswith(("+++", "---")) else None
    safe = markup.escape(line)
    return f'<span style="background:{ground}">{safe}</span>' if ground else safe
