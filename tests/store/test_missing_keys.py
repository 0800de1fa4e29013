"""What is missing has a key that programs and views go by: set wherever it is made, kept on disk, found in old runs."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpulab
from gpulab.run import Missing, Run
from gpulab.store import run_format
from gpulab.views.report import sections
from gpulab.views.report.report import Report
from tests.support.synthetic import no_step_case, no_trace_case


def stored(run: Run, *, with_keys: bool) -> Run:
    """The run as it comes back from disk; without keys as older versions wrote it."""
    document, columns = run_format.encode(run)
    if not with_keys:
        plain = json.loads(document)
        for missing in plain["missing"]:
            del missing["key"]
        document = json.dumps(plain).encode()
    return run_format.decode(document, io.BytesIO(columns))


def why_no_breakdown(run: Run) -> str:
    return sections.why_no_breakdown(replace(no_step_case().facts, run=run, integrity=None))


def test_every_missing_is_made_with_a_key() -> None:
    folder = Path(gpulab.__file__).parent
    bare = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Missing":
                given = len(node.args) >= 4 or any(k.arg == "key" for k in node.keywords)
                starred = any(isinstance(a, ast.Starred) for a in node.args)
                if not given and not starred:
                    bare.append(f"{path.name}:{node.lineno}")
    assert not bare


def test_a_key_is_kept_and_the_words_do_not_matter() -> None:
    run = replace(no_step_case().run, missing=(Missing("anything", "a reason", 5, "breakdown"),))
    back = stored(run, with_keys=True)
    assert back.missing == run.missing
    given = Report(replace(no_step_case().facts, run=back), no_step_case().diagnosis).json()["missing"]
    assert given == [{"key": "breakdown", "what": "anything", "reason": "a reason", "since_us": 0.005}]
    assert why_no_breakdown(back) == "a reason"
    assert why_no_breakdown(replace(run, missing=(Missing("the breakdown", "no", key="other"),))) != "no"


@pytest.mark.parametrize("case", [no_step_case(), no_trace_case()], ids=["no step", "no trace"])
def test_a_run_saved_without_keys_still_tells_its_reasons(case: object) -> None:
    run = case.run  # type: ignore[attr-defined]
    old = stored(run, with_keys=False)
    assert old.missing == run.missing and all(m.key for m in old.missing)
    assert why_no_breakdown(old) == why_no_breakdown(run)


def test_words_of_another_program_get_no_key() -> None:
    run = replace(no_step_case().run, missing=(Missing("something unheard of", "a reason"),))
    assert stored(run, with_keys=False).missing == run.missing
