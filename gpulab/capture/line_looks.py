"""What was seen of the stacks, as the record keeps it: lines by number, and the source around the hottest of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gpulab.capture.dataloader.worker import is_collating
from gpulab.capture.pauses.line_watch import is_ours, users_lines
from gpulab.capture.pauses.source_lines import Naming
from gpulab.capture.stacks.stack import Spot
from gpulab.capture.stacks.watcher import Looks
from gpulab.run import LoadingLooks

EXCERPTS = 3  # lines whose surroundings are kept, of the loop and of the loading each


def loading_looks_of(seen: Sequence[Looks], naming: Naming) -> LoadingLooks | None:
    """How often each line was met by those who make the batches; None where nobody has looked at them."""
    if not any(len(looks.t_ns) for looks in seen):
        return None
    counts: Counter[tuple[Spot | None, bool]] = Counter()
    for looks in seen:
        lines = [users_lines(stack) for stack in looks.stacks]
        rows = [(line[0] if line else None, is_collating(s)) for line, s in zip(lines, looks.stacks, strict=True)]
        counts.update(rows[i] for i in looks.stack if not is_ours(looks.stacks[i]))
    keep_excerpts([spot for spot, _ in counts.elements()], naming)
    return LoadingLooks(
        place=np.array([naming.number(spot) for spot, _ in counts], np.int32),
        collating=np.array([collating for _, collating in counts], np.uint8),
        count=np.array(list(counts.values()), np.int64),
    )


def keep_excerpts(spots: Iterable[Spot | None], naming: Naming) -> None:
    """Of the lines that most looks have met."""
    for spot, _ in Counter(spot for spot in spots if spot is not None).most_common(EXCERPTS):
        naming.excerpt(spot)
