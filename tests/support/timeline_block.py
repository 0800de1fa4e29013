"""Reads the timeline of a report's page as the browser does, without gpulab's own code."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

from msgspec import Struct

BLOCK = re.compile(r'<script type="application/octet-stream" class="tl-data">([A-Za-z0-9+/=]*)</script>')


class DecodedSpan(Struct, frozen=True):
    """One span or piece of the strip, times in nanoseconds since the first thing drawn."""

    start: int
    end: int
    name: str
    kind: list[str]  # label, category or meaning, colour
    lane: str
    row: int
    launch: int | None  # index among the spans


def decoded(page: str) -> tuple[dict[str, Any], list[DecodedSpan], list[DecodedSpan]]:
    """The head, the spans, and the pieces of the strip."""
    (block,) = BLOCK.findall(page)
    raw = zlib.decompress(base64.b64decode(block))
    at = 4 + int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4:at])
    count, columns = head["count"], {}
    for name, planes in head["columns"]:
        bytes_of = [raw[at + p * count : at + (p + 1) * count] for p in range(planes)]
        columns[name] = [int.from_bytes(row, "little") for row in zip(*bytes_of, strict=True)]
        at += planes * count
    assert at == len(raw), "bytes are left over"
    rows = [(lane["label"], first, size) for lane in head["lanes"] for first, size in lane["rows"]]
    assert [first for _, first, _ in rows] == [sum(size for _, _, size in rows[:i]) for i in range(len(rows))]
    found = []
    for row, (lane, first, size) in enumerate([*rows, ("strip", head["spans"], count - head["spans"])]):
        start = 0
        for i in range(first, first + size):
            start += columns["gap"][i]
            launch = columns["launch"][i] - 1
            kind = [*head["kinds"], *head["parts"]][columns["kind"][i]]
            name = head["names"][columns["name"][i]]
            end = start + columns["duration"][i]
            found.append(DecodedSpan(start, end, name, kind, lane, row, launch if launch >= 0 else None))
    return head, found[: head["spans"]], found[head["spans"] :]
