"""The edit that keeps a value: applied, it changes that one value of the user's cell and nothing else."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gpulab.knobs.accumulation import ACCUMULATE
from gpulab.knobs.dataset_cache import DatasetCache
from gpulab.knobs.edits import Edit, edit, parse
from gpulab.knobs.knob import CodeEdit, LoopEnd
from gpulab.knobs.mixed_precision import AMP
from gpulab.knobs.observation import Observation
from gpulab.knobs.variables import code_edit
from gpulab.run import Device

WORKERS = CodeEdit("DataLoader(..., num_workers=4)", "DataLoader", "num_workers", "4")
BATCH = CodeEdit("DataLoader(..., batch_size=64)", "DataLoader", "batch_size", "64")
FUSED = CodeEdit("AdamW(..., fused=True)", "AdamW", "fused", "True")
CACHE = DatasetCache().code_edit(Observation(Device("cpu", "")), True)
TF32 = CodeEdit('torch.set_float32_matmul_precision("high")')


def applied(text: str, diff: str) -> str:
    """What a patch program makes of the cell: hunks by their own line numbers, every context line checked."""
    old, new, at = text.split("\n"), list[str](), 0
    lines = diff.split("\n")
    for number, line in enumerate(lines):
        if not line.startswith("@@"):
            continue
        first, _, count = line.split()[1].lstrip("-").partition(",")
        start = int(first) - (count != "0")
        new += old[at:start]
        at = start
        for hunk in lines[number + 1 :]:
            if hunk.startswith(("@@", "#")) or not hunk:
                break
            if hunk[0] in " -":
                assert old[at] == hunk[1:]
                at += 1
            if hunk[0] in " +":
                new.append(hunk[1:])
    return "\n".join(new + old[at:])


def changed(cell: str, *edits: CodeEdit) -> str:
    """The cell after a diff was applied to it."""
    result = edit(cell, edits)
    assert result.is_diff, result.text
    assert applied(cell, result.text) == result.cell
    return result.cell


# -- generated calls ------------------------------------------------------------------------------------------------


def bound(*args: Any, **keywords: Any) -> dict[str, Any]:
    """What torch's DataLoader would be given."""
    return dict(inspect.signature(DataLoader).bind(*args, **keywords).arguments)


VALUES = ["1", "(2)", "[3, 4][0]", "n", "(n +\n     1)", "len('ä,b)')", '"#no comment"', "(lambda x: x)(2)", "f'{n}'"]
KEYWORDS = ["shuffle", "num_workers", "pin_memory", "drop_last", "timeout", "batch_size", "generator"]
CALLEES = ["DataLoader", "DL", "torch.utils.data.DataLoader", "data . DataLoader"]
GAPS = ["", " ", "  # keep, me) (", "  # ünï"]
HEADS = ["", "%%time\n", "!pip install x \\\n  y\n", "%matplotlib inline\n", "files = !ls\n", "n?\n", "'ä'; "]


@st.composite
def cells(draw: st.DrawFn) -> str:
    """A cell with one DataLoader call in many formats."""
    positional = ["data" if draw(st.booleans()) else "(data)"]
    positional += draw(st.sampled_from([[], [draw(st.sampled_from(VALUES))]]))
    names = draw(
        st.lists(st.sampled_from([k for k in KEYWORDS if len(positional) < 2 or k != "batch_size"]), unique=True)
    )
    arguments = positional + [f"{k}{draw(st.sampled_from(['=', ' = ']))}{draw(st.sampled_from(VALUES))}" for k in names]
    separator, opening, closing = draw(st.sampled_from(["one line", "own lines", "hanging", "mixed"])), "", ""
    indent = draw(st.sampled_from(["", "    ", "\t"]))
    if separator == "own lines":
        opening, closing = f"\n{indent}    ", f"\n{indent}"
    text = arguments[0]
    for argument in arguments[1:]:
        breaks = separator != "one line" and (separator != "mixed" or draw(st.booleans()))
        text += f",{draw(st.sampled_from(GAPS))}\n{indent}    {argument}" if breaks else f", {argument}"
    text += draw(st.sampled_from(["", ",", " ,"]))
    if closing:
        closing = draw(st.sampled_from(GAPS)) + closing
    head = f"if True:\n{indent}m = 1\n" if indent else ""
    call = f"loader = {draw(st.sampled_from(CALLEES))}({opening}{text}{closing})"
    return (
        f"{draw(st.sampled_from(HEADS))}from torch.utils.data import DataLoader as DL\n{head}{indent}{call}; done = 1"
    )


def run(cell: str) -> dict[str, Any]:
    """What a cell's DataLoader is given, IPython's lines left out."""
    data = type("data", (), {"DataLoader": staticmethod(bound)})
    torch = type("torch", (), {"utils": type("utils", (), {"data": data})})
    tree = parse(cell)
    assert tree is not None
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    names: dict[str, Any] = {"DataLoader": bound, "DL": bound, "torch": torch, "data": data, "n": 7}
    exec(compile(tree, "cell", "exec"), names)
    assert names["done"] == 1
    return {k: v for k, v in names["loader"].items() if not callable(v)}


def comments(cell: str) -> list[str]:
    python = "\n".join(line for line in cell.split("\n") if line[:1] not in ("%", "!") and line != "  y")
    try:
        return [t.string for t in tokenize.generate_tokens(io.StringIO(python).readline) if t.type == tokenize.COMMENT]
    except (tokenize.TokenError, IndentationError):
        return []


@settings(max_examples=200)
@given(cells(), st.sampled_from([(WORKERS,), (BATCH,), (WORKERS, BATCH), (BATCH, WORKERS)]))
def test_the_edited_call_gets_the_value_and_nothing_else(cell: str, edits: tuple[CodeEdit, ...]) -> None:
    new = changed(cell, *edits)
    assert run(new) == {**run(cell), **{p.keyword: int(p.literal) for p in edits}}
    assert set(comments(cell)) <= set(comments(new))
    touched = [line for line in cell.split("\n") if line not in new.split("\n")]
    assert len(touched) <= 2 * len(edits)  # the argument that gets a comma or a value; a value over two lines


# -- formats, word for word -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(ds)", "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds,)", "DataLoader(ds, num_workers=4,)"),
        ("DataLoader(ds, num_workers = 0)", "DataLoader(ds, num_workers = 4)"),
        ("DataLoader(ds, 8, True, None, None, 2)", "DataLoader(ds, 8, True, None, None, 4)"),
        ("DataLoader()", "DataLoader(num_workers=4)"),
        (
            "DataLoader(\n    ds,\n    shuffle=True,\n)",
            "DataLoader(\n    ds,\n    shuffle=True,\n    num_workers=4,\n)",
        ),
        (
            "DataLoader(\n    ds,  # mine\n    shuffle=True  # yes, (all)\n)",
            "DataLoader(\n    ds,  # mine\n    shuffle=True,  # yes, (all)\n    num_workers=4\n)",
        ),
        ("DataLoader(\n    ds, shuffle=True\n)", "DataLoader(\n    ds, shuffle=True, num_workers=4\n)"),
        (
            "DataLoader(\n\tds,\n\tcollate_fn=[\n\t\t1\n\t])",
            "DataLoader(\n\tds,\n\tcollate_fn=[\n\t\t1\n\t],\n\tnum_workers=4)",
        ),
        *(
            (cell, cell.replace("DataLoader(ds)", "DataLoader(ds, num_workers=4)"))
            for cell in (
                "%%time\n!pip install a \\\n   b\nx = %timeit -o f()\nif x:\n    !ls\nDataLoader(ds)\nDataLoader?",
                "%matplotlib inline\nx = (7\n% 4)\nDataLoader(ds)",  # a percent sign of Python
            )
        ),
        ("DataLoader(ds, num_workers=0, **options)", "DataLoader(ds, num_workers=4, **options)"),
    ],
)
def test_formatting_is_kept(before: str, after: str) -> None:
    assert changed(before, WORKERS) == after


def test_the_text_is_a_diff_that_says_what_it_is() -> None:
    result = edit("a = 1\nloader = DataLoader(ds)\nb = 2", [WORKERS])
    assert result.text.split("\n") == [
        "--- your code",
        "+++ your code with num_workers=4",
        "@@ -1,3 +1,3 @@",
        " a = 1",
        "-loader = DataLoader(ds)",
        "+loader = DataLoader(ds, num_workers=4)",
        " b = 2",
    ]


# -- which call -----------------------------------------------------------------------------------------------------

TWO = """\
train = DataLoader(a)
test = DataLoader(b)
for epoch in range(3):
    for x, y in {train}:
        loss(net(x), y).backward()
        optimizer.step()
    for x, y in test:
        net(x)
"""
LOOP = "\n    f(x).backward()"


@pytest.mark.parametrize(
    "cell",
    [
        *(TWO.replace("{train}", it) for it in ("train", "enumerate(train)", "tqdm(train, total=len(train))")),
        TWO.replace("{train}", "iter(train)"),
        "test, train = DataLoader(b), DataLoader(a)\nfor x in train:" + LOOP,
        "test = DataLoader(b)\nfor x in DataLoader(a):" + LOOP,
    ],
)
def test_of_two_loaders_the_one_that_trains_is_changed(cell: str) -> None:
    assert changed(cell, WORKERS) == cell.replace("DataLoader(a)", "DataLoader(a, num_workers=4)")


def test_a_cached_dataset_with_a_name_is_read_by_its_name() -> None:
    result = edit("loader = DataLoader(self.data, 2)", [CACHE])
    assert result.cell == "loader = DataLoader([self.data[i] for i in range(len(self.data))], 2)"
    assert "+++ your code with cache=on" in result.text and "for items in [i]" in changed("DataLoader(i)", CACHE)


@pytest.mark.parametrize("dataset", ["Digits(*paths)", "dataset=Digits(*paths)", "dataset =\n  Digits(*paths)"])
def test_a_value_that_wraps_the_cells_own_has_its_expression(dataset: str) -> None:
    made, paths = [], (3,)

    def digits(count: int) -> range:
        made.append(count)
        return range(5, 5 + count)

    new = changed(f"loader = DataLoader({dataset}, batch_size=2)", CACHE)
    names: dict[str, Any] = {"Digits": digits, "paths": paths, "DataLoader": bound}
    exec(new, names)
    assert names["loader"] == {"dataset": [5, 6, 7], "batch_size": 2}
    assert made == [3]  # built once


def test_where_one_cannot_be_chosen_all_are_changed() -> None:
    cell = "fit(DataLoader(a), DataLoader(b))"
    result = edit(cell, [WORKERS])
    assert result.cell == "fit(DataLoader(a, num_workers=4), DataLoader(b, num_workers=4))"
    assert result.text.startswith("# All 2 DataLoader calls are changed")
    assert applied(cell, result.text) == result.cell
    two = "d = torch.optim.AdamW(a)\ng = torch.optim.AdamW(b, lr=1)\nfor x in y:\n    d.step()"
    assert changed(two, FUSED).count("fused=True") == 2 and not edit(two, [FUSED]).text.startswith("#")
    there = edit("DataLoader(ds, num_workers=4)", [WORKERS])
    assert not there.is_diff and "already" in there.text


# -- variables, snippets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "name", "value", "after"),
    [
        ("hidden = 64  # wide\nf(hidden)", "hidden", 512, "hidden = 512  # wide\nf(hidden)"),
        ("lr: float = 1e-3\nf(lr)", "lr", -0.5, "lr: float = -0.5\nf(lr)"),
        ("a, b = 1, 'x'\nf(a, b)", "b", "it's", 'a, b = 1, "it\'s"\nf(a, b)'),
        ("%time\nsizes = (\n    1,\n    2,\n)", "sizes", (3, (4.5, None)), "%time\nsizes = (3, (4.5, None))"),
        ("a = 1\na = 2\nf(a)\na = 3", "a", True, "a = True\na = True\nf(a)\na = 3"),
    ],
)
def test_a_literal_of_the_cell_is_changed(cell: str, name: str, value: Any, after: str) -> None:
    assert changed(cell, code_edit(name, value)) == after


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ("train()", WORKERS),  # no such call
        ("DataLoader(ds, **options)", WORKERS),  # options may have it
        ("DataLoader(*arguments)", WORKERS),  # by position, perhaps
        ("DataLoader(x for x in y)", WORKERS),
        ("DataLoader(batch_size=8)", CACHE),  # what it would wrap is not there
        ("this is no Python", WORKERS),
        ("DataLoader(ds)\r\nx", WORKERS),
        ("f(hidden)", code_edit("hidden", 512)),
        ("f(hidden)\nhidden = 3", code_edit("hidden", 512)),
        ("f(lr)", code_edit("lr", float("inf"))),
        ("DataLoader(ds)", TF32),
    ],
)
def test_what_cannot_be_located_is_a_snippet(cell: str, wanted: CodeEdit) -> None:
    assert edit(cell, [wanted]) == Edit(wanted.snippet, False, cell)


def test_snippets_follow_the_diff() -> None:
    cell = "DataLoader(ds)\nx = 1"
    result = edit(cell, [TF32, WORKERS, TF32])
    assert result.is_diff and result.text.count(TF32.snippet) == 1
    assert applied(cell, result.text) == result.cell == "DataLoader(ds, num_workers=4)\nx = 1"


def test_two_that_change_the_end_of_the_loop_give_one_end() -> None:
    observation = Observation(Device("cuda", "GPU"))
    wanted = [ACCUMULATE.code_edit(observation, 2), AMP.code_edit(observation, "fp16")]
    code = edit("train()", wanted).text
    assert code.count("backward()") == code.count("step(optimizer)") == code.count("zero_grad()") == 1
    assert "scaler.scale(loss / 2).backward()" in code and "optimizer.step()" not in code
    compile(code, "snippet", "exec")
    with_bf16 = edit("train()", [wanted[0], AMP.code_edit(observation, "bf16")]).text
    assert with_bf16.count("backward()") == 1 and "scaler" not in with_bf16


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_end_of_a_loop_is_code_with_one_backward_pass(batches: int, scaled: bool) -> None:
    text = LoopEnd(batches, scaled).text
    compile(text, "snippet", "exec")
    assert text.count("backward()") == 1
    assert ("scaler.update()" in text) == scaled and ("optimizer.zero_grad()" in text) == (batches > 1)
