"""The picture of how reading time grows with the number of events, from the kept results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parent / "results" / "growth.png"


def draw(growth: list[dict[str, Any]]) -> None:
    """Seconds over events, with the straight line through the origin that fits best."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    events = [g["events"] / 1e6 for g in growth]
    seconds = [g["seconds"] for g in growth]
    slope = sum(e * s for e, s in zip(events, seconds, strict=True)) / sum(e * e for e in events)
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    axes.plot(
        [0, max(events)], [0, slope * max(events)], color="#999999", linewidth=1.2, label=f"{slope:.2f} µs per event"
    )
    axes.plot(events, seconds, "o", color="#1f6fb2", markersize=7, label="measured, the better of two")
    axes.set_xlabel("million events in the file")
    axes.set_ylabel("seconds to read and account")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(PICTURE, metadata={"Software": None})
    plt.close(figure)
