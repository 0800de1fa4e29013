"""Byte-level mutations of real trace files: each must give a report or one sentence, never another error.

    python -m benchmarks.fuzz [--inputs 100000] [--seed 0] [--traces FOLDER]

A real file is first thinned to some dozens of its events, in its own bytes, so that a mutation has a chance to hit
every part of it. Two thirds of the mutations are made to the text, a third to the gzipped file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

import gpulab
from benchmarks import synthetic_trace
from benchmarks.harness import Figure
from gpulab.errors import TraceError
from gpulab.trace.load import load_run

MOST_EVENTS = 60
_OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKENS = (
    b"null", b"NaN", b"Infinity", b"-1", b"1e999", b"99999999999999999999", b'""', b"[]", b"{}", b"\xff", b"\x00",
    b"\x1b",
    b'"', b"\\", b"\\u", b"\\ud800", b",", b"}", b"]", b"{", b"[", b":", b'"ph": "X"', b'"ph": "Q"', b"true", b"1.5e3",
    b'"12.5"', b"-0", b"0x1f", b'"stream 7"', b"\n", b"[" * 2000, b'}, {"ph": "X"', b"1623142623460016.123",
)  # fmt: skip


class Outcome(Struct):
    """What a fuzz run found: how the inputs ended, and the inputs that ended otherwise."""

    inputs: int = 0
    traces: int = 0
    damaged: int = 0
    sentences: Counter[str] = field(default_factory=Counter)
    unhandled: list[tuple[str, str]] = field(default_factory=list)
    slowest_s: float = 0.0


def thinned(text: bytes, events: int = MOST_EVENTS) -> bytes:
    """The text of a trace with about `events` of its events left, evenly chosen; all other bytes unchanged."""
    opening = _OPENING.search(text)
    if opening is None:
        return text
    decoder, readable, at = json.JSONDecoder(strict=False), text.decode("latin-1"), opening.end()
    result: list[bytes] = []
    while True:
        gap = re.compile(rb"[\s,]*").match(text, at)
        start = gap.end() if gap else at
        if text[start : start + 1] != b"{":
            break
        _, at = decoder.raw_decode(readable, start)
        result.append(text[start:at])
    selection = result[:: max(1, len(result) // events)] + result[-3:]
    return text[: opening.end()] + b"\n  " + b",\n  ".join(selection) + b"\n  " + text[start:]


def mutated(data: bytes, random_: random.Random) -> bytes:
    """One to four changes: a bit, a byte, a token put in or over, a stretch cut, doubled or moved, the end off."""
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        if not data:
            return data
        data = random_.choice(_MUTATIONS)(data, random_)
    return data


def _flip(data: bytes, random_: random.Random) -> bytes:
    at = random_.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random_.randrange(8)]) + data[at + 1 :]


def _insert(data: bytes, random_: random.Random) -> bytes:
    at = random_.randrange(len(data))
    return data[:at] + random_.choice(_TOKENS) + data[at:]


def _overwrite(data: bytes, random_: random.Random) -> bytes:
    """A value of the JSON replaced by a token; in other bytes, just those bytes."""
    values = [m.span(1) for m in re.finditer(rb':\s*("[^"]*"|[-\d.]+|null)', data[:200_000])]
    start, end = random_.choice(values) if values else (random_.randrange(len(data)),) * 2
    return data[:start] + random_.choice(_TOKENS) + data[end:]


def _cut(data: bytes, random_: random.Random) -> bytes:
    start = random_.randrange(len(data))
    return data[:start] + data[start + random_.choice((1, 3, 40, 1000)) :]


def _double(data: bytes, random_: random.Random) -> bytes:
    start = random_.randrange(len(data))
    stretch = data[start : start + random_.choice((1, 3, 40, 1000))]
    return data[:start] + stretch + data[start:]


def _move(data: bytes, random_: random.Random) -> bytes:
    start, to = random_.randrange(len(data)), random_.randrange(len(data))
    stretch = data[start : start + 60]
    rest = data[:start] + data[start + 60 :]
    return rest[:to] + stretch + rest[to:]


def _end(data: bytes, random_: random.Random) -> bytes:
    return data[: random_.randrange(len(data) + 1)]


_MUTATIONS: Sequence[Callable[[bytes, random.Random], bytes]] = (
    _flip, _insert, _overwrite, _overwrite, _cut, _double, _move, _end,
)  # fmt: skip


def run(seeds: Sequence[bytes], inputs: int, seed: int, folder: Path) -> Outcome:
    """Read `inputs` mutations of the seeds (texts of traces)."""
    random_ = random.Random(seed)
    zipped = [gzip.compress(s, 6) for s in seeds]
    outcome, path = Outcome(), folder / "mutated.json"
    for number in range(inputs):
        data = mutated(random_.choice(zipped if number % 3 == 2 else seeds), random_)
        path.write_bytes(data)
        _read(path, data, number, outcome)
    return outcome


def _read(path: Path, data: bytes, number: int, outcome: Outcome) -> None:
    outcome.inputs += 1
    begun = time.perf_counter()
    try:
        loaded = load_run(path)
        shown = gpulab.report(loaded)
        shown.text(), json.dumps(shown.json(), allow_nan=False)
    except TraceError as e:
        outcome.sentences[re.sub(r"[\d,]+|'[^']*'|\(.*\)", "…", str(e).replace(str(path), "FILE"))[:60]] += 1
    except Exception:
        outcome.unhandled.append((f"input {number}", traceback.format_exc(limit=-4)))
        path.with_name(f"unhandled-{number}.json").write_bytes(data)
    else:
        outcome.traces += 1
        outcome.damaged += bool(loaded.origin and loaded.origin.damage)
    outcome.slowest_s = max(outcome.slowest_s, time.perf_counter() - begun)


def seeds(traces: Path | None) -> list[bytes]:
    """Thinned real traces, where there are any, and a synthetic one."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "tests.support.synthetic.json"
        synthetic_trace.write(made, 120)
        result = [made.read_bytes()]
    files = sorted(traces.rglob("*.json.gz")) if traces is not None and traces.is_dir() else []
    return result + [thinned(gzip.decompress(f.read_bytes())) for f in files]


def measure(inputs: int = 100_000) -> dict[str, object]:
    """How many mutated files became reports, how many one sentence, how many neither."""
    with tempfile.TemporaryDirectory(prefix="gpulab-fuzz-") as folder:
        result = run(seeds(Path(__file__).parents[2] / "shared" / "traces"), inputs, 0, Path(folder))
    return {
        "inputs": result.inputs,
        "reports": result.traces,
        "with_damage_noted": result.damaged,
        "sentences": sum(result.sentences.values()),
        "unhandled": [text for _, text in result.unhandled],
        "slowest_s": result.slowest_s,
    }


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How the inputs ended."""
    yield Figure.share(
        f"a report, {results['with_damage_noted']:,} of them with damage noted", results["reports"], results["inputs"]
    )
    yield Figure.share("one sentence", results["sentences"], results["inputs"])
    yield Figure("anything else", len(results["unhandled"]), target="unhandled")
    yield Figure("slowest", results["slowest_s"], "s")


def main() -> None:
    """Run from the command line; exits with 1 where an input was not handled."""
    parser = argparse.ArgumentParser(prog="fuzz", description="Read mutated trace files.")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[2] / "shared" / "traces")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpulab-fuzz-"))
    result = run(seeds(options.traces), options.inputs, options.seed, folder)
    print(
        f"{result.inputs:,} inputs: {result.traces:,} traces ({result.damaged:,} with damage noted), "
        f"{sum(result.sentences.values()):,} refused in a sentence, {len(result.unhandled)} unhandled; "
        f"slowest {result.slowest_s:.2f} s"
    )
    for sentence, count in result.sentences.most_common(20):
        print(f"  {count:7,}  {sentence}")
    for where, text in result.unhandled[:10]:
        print(f"{where}\n{text}")
    if result.unhandled:
        raise SystemExit(f"unhandled inputs are kept in {folder}")


if __name__ == "__main__":
    main()
