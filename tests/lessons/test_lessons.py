"""The lessons run from top to bottom without a person, and their checks say what is wrong with an answer."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import nbclient
import nbformat
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from gpulab.lessons import (
    batch_size,
    check_enough,
    measured,
    starving,
    times_faster,
    told_share,
    told_times,
)
from gpulab.lessons.batch_size import Batch, DigitsInMemory, check_accumulation, whole_batch
from gpulab.lessons.check import Checked, Note
from gpulab.lessons.measured import Faster, Swept
from gpulab.lessons.starving import DistantDigits, Fed, check_loader
from gpulab.tuning.record import Comparison, Experiment
from gpulab.verdict import verdict
from gpulab.views.comparison.comparison import Compared
from tests.support import leftovers
from tests.support.comparisons import a_comparison
from tests.support.paths import ROOT

Batches = Sequence[Batch]
Unit = Literal["sample", "step"]
Ran = Callable[[str, Experiment], None]

NOTEBOOKS = ROOT / "notebooks"
TEXTS = sorted((NOTEBOOKS / "lessons").glob("*.md"))
LONG_S = 1200  # for a notebook on a busy machine

SOLUTION = re.compile(r"<details>.*?```python\n(?P<code>.*?)\n```.*?</details>", re.DOTALL)
LEFT_BEHIND = """
scope = {"__name__": "leftovers"}
exec(%r, scope)
print(scope["leftovers"]())
""" % Path(leftovers.__file__).read_text(encoding="utf-8")  # noqa: UP031


# -- the notebooks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_lessons", NOTEBOOKS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_lessons() -> None:
    assert {"03_starving_gpu", "05_batch_size"} <= {path.stem for path in TEXTS}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_notebook_is_what_its_text_says(build: ModuleType, path: Path) -> None:
    made = build.notebook_of(path.read_text(encoding="utf-8"))
    assert (NOTEBOOKS / f"{path.stem}.ipynb").read_text(encoding="utf-8") == made, "run python notebooks/build.py"
    written = re.findall(r"^```python ([\w-]+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [cell["id"] for cell in json.loads(made)["cells"] if cell["cell_type"] == "code"] == written


def test_text_and_code_become_cells_and_nothing_is_lost(build: ModuleType) -> None:
    text = (
        "# Idea\n\n```python first\n%%magic\na = 1\n```\n\n```python second\nb\n```\n\nEnd\n\n```python\nshown\n```\n"
    )
    cells = json.loads(build.notebook_of(text))["cells"]
    assert [(c["cell_type"], c["id"], "".join(c["source"])) for c in cells] == [
        ("markdown", "about-first", "# Idea"),
        ("code", "first", "%%magic\na = 1"),
        ("code", "second", "b"),
        ("markdown", "end", "End\n\n```python\nshown\n```"),
    ]


def test_the_list_of_lessons_names_every_notebook() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.ipynb\)", (NOTEBOOKS / "README.md").read_text(), flags=re.MULTILINE)
    assert listed == [(path.stem, path.stem) for path in sorted(NOTEBOOKS.glob("*.ipynb"))]


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, list[str]]]:
    """`execute(stem, *further)` → the texts each code cell showed, by its id; `further` cells run after the last."""
    monkeypatch.setenv("GPULAB_DEMO_DATA", str(tmp_path / "digits"))

    def executed(stem: str, *further: tuple[str, str]) -> dict[str, list[str]]:
        notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
        for name, code in further:
            notebook.cells.append(nbformat.v4.new_code_cell(code, id=name))
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=LONG_S, kernel_name="python3", resources=resources).execute()
        return {cell.id: [*_texts(cell.outputs)] for cell in notebook.cells if cell.cell_type == "code"}

    return executed


def _texts(outputs: Sequence[nbformat.NotebookNode]) -> Iterator[str]:
    for output in outputs:
        assert output.output_type != "error"
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if text:  # the place of a progress line or of a Stop button stays, and is empty
            yield text


def solution(stem: str) -> str:
    """What the lesson hides behind a line to click on."""
    found = SOLUTION.search((NOTEBOOKS / "lessons" / f"{stem}.md").read_text(encoding="utf-8"))
    assert found is not None
    return found["code"]


@pytest.mark.timeout(LONG_S + 60)
def test_lesson_03_runs_unanswered_and_its_solution_is_taken(execute: Callable[..., dict[str, list[str]]]) -> None:
    shown = execute(
        "03_starving_gpu",
        ("solution", solution("03_starving_gpu")),
        ("check-solution", "check_loader(my_loader, given_loader, train)"),
        ("left-behind", LEFT_BEHIND),
    )
    # beside other programs the cores come first
    assert any(cause in shown["starving"][0] for cause in ("waiting for the next batch of data", "take your CPU"))
    for told in ("told-waiting", "told-workers"):
        assert shown[told][0].startswith(("No guess. Measured: ", "Undecided. "))  # a busy machine may hide it
    assert "workers=2" in shown["two-workers"][0]
    for workers in (1, 2, 4):
        assert f"workers={workers}" in shown["sweep-workers"][0]
    assert "cache=on" in shown["cache"][0]
    for knob in ("prefetch=4", "pin_memory=on: there is no GPU to pin memory for", "persistent_workers=on"):
        assert knob in "".join(shown["finer-knobs"])
    for check in ("check-enough", "check-loader"):
        assert shown[check][0].startswith("Not answered yet. ")
    solved = shown["check-solution"][-1]
    assert "4 workers: " in solved or solved.startswith("Undecided"), "how fast it was is the machine's affair"
    assert shown["left-behind"] == ["[]\n"]


@pytest.mark.timeout(LONG_S + 60)
def test_lesson_05_runs_unanswered_and_its_solution_is_right(execute: Callable[..., dict[str, list[str]]]) -> None:
    shown = execute(
        "05_batch_size",
        ("solution", solution("05_batch_size")),
        ("check-solution", "check_accumulation(one_step)"),
        ("left-behind", LEFT_BEHIND),
    )
    assert "small-batches" in shown["small-batches"][0]
    assert "per sample" in shown["batch-of-32"][0] and "batch_size=32" in shown["batch-of-32"][0]
    for told in ("told-batch", "told-accumulate"):
        assert shown[told][0].startswith(("No guess. Measured: ", "Undecided. "))  # a busy machine may hide it
    for size in (16, 32, 64, 128, 256, 512):
        assert f"batch_size={size}" in shown["sweep-batch"][0]
    assert "accumulate=" in shown["accumulate"][0]
    for check in ("check-enough", "check-accumulation"):
        assert shown[check][0].startswith("Not answered yet. ")
    assert shown["check-solution"][0].startswith("Right. ")
    assert shown["left-behind"] == ["[]\n"]


# -- guesses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "opening"), [(78, "Close."), (60.0, "Not far off."), (10, "A surprise."), (..., "No guess.")]
)
def test_a_guessed_share_is_told_how_close_it_was(guess: object, opening: str) -> None:
    told = told_share(guess, 0.8, "of each step waits for data")
    assert told.opening == opening
    assert "Measured: 80 % of each step waits for data." in told.words
    assert ("Your guess was" in told.words) == (guess is not ...)


@pytest.mark.parametrize(("guess", "opening"), [(2.5, "Close."), (4, "A surprise."), (1.9, "Not far off.")])
def test_a_guessed_factor_is_judged_as_a_ratio(guess: float, opening: str) -> None:
    assert told_times(guess, Faster(2.4, sure=True), "with two workers").opening == opening
    assert told_times(2.4 * 2.4 / guess, Faster(2.4, sure=True), "").opening == opening, "too much is like too little"


@pytest.mark.parametrize("guess", ["40 %", True, float("nan"), float("inf"), [40]])
def test_what_is_no_number_is_named(guess: object) -> None:
    told = told_share(guess, 0.8, "of each step waits for data")
    assert told.opening == "No number." and repr(guess) in told.words


def test_a_figure_that_was_not_measured_is_not_a_zero() -> None:
    assert told_share(40, None, "of each step").opening == "Not measurable."
    assert told_times(2, None, "with workers").opening == "Not measurable."
    assert told_times(0, Faster(2.0, sure=True), "with workers").opening == "No number."
    unsure = told_times(2, Faster(1.9, sure=False), "with two workers")
    assert unsure.opening == "Undecided." and "1.9 times as fast with two workers, and that may" in unsure.words


def test_what_a_reader_wrote_is_escaped() -> None:
    page = told_share("<script>", 0.8, "of it")._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "Not yet." in Checked("wrong", "why")._repr_html_()
    assert repr(Note("Close.", "words")) == "Close. words"


# -- a sweep's smallest value that is as good as the best --------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """`ran(name, experiment)`: it was the last to run in this process."""
    known: list[Compared] = []
    monkeypatch.setattr(measured, "experiments", known)
    return lambda name, experiment: known.append(Compared(replace(experiment, name=name)))


def swept(
    times: dict[int, float | None], knob: str = "workers", unit: Unit = "step", spread: float = 1.02
) -> Experiment:
    """A sweep whose values took this many times as long as the cell as written; None: it failed."""
    compared = [_of(knob, value, time, unit, spread) for value, time in times.items()]
    return Experiment((compared[0].a, *(c.b for c in compared)), tuple(compared), 1.0)


def _of(knob: str, value: int, time: float | None, unit: Unit, spread: float = 1.02) -> Comparison:
    """The time of the other unit tells the contrary. `spread`: how far the interval reaches, as a factor."""
    made = a_comparison()
    other = None if time is None else 1 / time
    step, sample = (time, other) if unit == "step" else (other, time)
    changed: dict[str, Any] = {"us_per_step": step, "us_per_sample": sample, "failure": "" if time else "out of memory"}
    b = replace(made.b, label=f"{knob}={value}", settings={knob: str(value)}, **changed)
    interval = None if time is None else (time / spread, time * spread)
    said = verdict(time, interval, made.noise_floor, made.pairs)
    a = replace(made.a, us_per_step=1.0, us_per_sample=1.0)
    return replace(made, a=a, b=b, ratio=time, interval=interval, verdict=said, unit=unit)


SWEEP = {1: 0.8, 2: 0.44, 4: 0.4, 8: 0.41}


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "0, 1, 2, 4, 8"),
        (None, "unanswered", "0, 1, 2, 4, 8"),
        (2, "right", "smallest"),
        (1, "wrong", "workers=4 is 2.0 times as fast as workers=1"),
        (0, "wrong", "workers=4 is 2.5 times as fast"),
        (4, "wrong", "workers=2 is smaller"),
        (3, "wrong", "3 is not among the values tried: 0, 1, 2, 4, 8"),
        ("2", "wrong", "'2' is not among"),
        (True, "wrong", "True is not among"),
    ],
)
def test_the_smallest_value_that_is_good_enough(ran: Ran, answer: object, state: str, hint: str) -> None:
    ran("how-many", swept(dict(SWEEP)))
    checked = check_enough(answer, "how-many", "workers", as_written=0)
    assert checked.state == state
    assert hint in checked.hint


@pytest.mark.parametrize("answer", [1, 2, 4, 8])
def test_no_answer_is_right_where_nothing_is_decided(ran: Ran, answer: int) -> None:
    """Intervals of 0.35 to 4.2, as a busy machine gives them."""
    ran("how-many", swept(dict(SWEEP), spread=3.5))
    checked = check_enough(answer, "how-many", "workers", as_written=0)
    assert checked.state == "undecided" and repr(checked).startswith("Undecided. It may be ")


def test_what_is_certainly_too_few_is_wrong_all_the_same(ran: Ran) -> None:
    ran("how-many", swept(dict(SWEEP), spread=1.2))
    assert check_enough(0, "how-many", "workers", as_written=0).state == "wrong"
    assert check_enough(2, "how-many", "workers", as_written=0).state == "undecided"
    ran("how-many", swept({2: 0.44}))
    assert check_enough(2, "how-many", "workers", as_written=0).state == "right"


def test_a_factor_of_an_undecided_experiment_is_not_sure(ran: Ran) -> None:
    for ratio, spread, sure in ((0.5, 1.02, True), (1.0, 1.01, True), (0.5, 3.0, False), (1.0, 1.3, False)):
        ran("two-workers", swept({2: ratio}, spread=spread))
        assert times_faster("two-workers") == Faster(1 / ratio, sure=sure), (ratio, spread)


def test_a_setting_that_failed_is_no_value_of_the_sweep() -> None:
    found = Swept.of(swept({16: 0.5, 32: None}, "batch_size", "sample"), "batch_size", as_written=8)
    assert found.times_us == {8: 1.0, 16: 0.5}


def test_another_experiment_is_not_taken_for_the_sweep(ran: Ran) -> None:
    for name, knob in (("other", "workers"), ("how-many", "accumulate")):
        ran(name, swept({4: 0.5}, knob))
        checked = check_enough(2, "how-many", "workers", as_written=0)
        assert checked.state == "unanswered" and "run that cell first" in checked.hint


def test_what_was_measured_is_known_by_its_name(ran: Ran) -> None:
    assert times_faster("two-workers") is None
    ran("two-workers", swept({2: 0.5}))
    ran("two-workers", swept({2: 0.4}))
    ran("cache", swept({1: 0.1}))
    assert times_faster("two-workers") == Faster(2.5, sure=True), "the latest of the name"
    ran("two-workers", swept({2: None}))
    assert times_faster("two-workers") is None, "it failed"


# -- lesson 03 ---------------------------------------------------------------------------------------------------------


DATA = TensorDataset(torch.zeros(64, 1), torch.zeros(64))


def loader(dataset: TensorDataset = DATA, **options: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    chosen = {"batch_size": 8, "shuffle": True, "drop_last": True, **options}
    return DataLoader(dataset, **chosen)  # type: ignore[arg-type]


GIVEN = loader()


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "DataLoader(…)"),
        (DATA, "wrong", "That is a TensorDataset"),
        (loader(TensorDataset(torch.zeros(64, 1))), "wrong", "another dataset"),
        (loader(batch_size=32), "wrong", "32 samples instead of 8"),
        (loader(shuffle=False), "wrong", "shuffle=True"),
        (loader(drop_last=False), "wrong", "drop_last=True"),
    ],
)
def test_another_training_is_no_answer(answer: object, state: str, hint: str) -> None:
    def must_not_run(loader: object) -> None:
        raise AssertionError("nothing is to be measured")

    checked = check_loader(answer, GIVEN, must_not_run)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_rounds_that_disagree_decide_nothing() -> None:
    before, fast, slow = Fed(0.1, 0.08), Fed(0.025, 0.01), Fed(0.09, 0.07)
    checked = starving._judged_rounds(2, [(fast, before), (slow, before)])
    assert checked.state == "undecided" and "1.11 times as fast in one round and 4.0 times in another" in checked.hint
    assert starving._judged_rounds(2, [(fast, before), (fast, before)]).state == "right"
    near = Fed(0.034, 0.02)  # 2.9 times: it missed the mark by little, and the other round did not
    assert starving._judged_rounds(2, [(near, before), (Fed(0.032, 0.02), before)]).state == "right"


@pytest.mark.parametrize(
    ("workers", "mine", "state", "hint"),
    [
        (4, Fed(0.025, 0.01), "right", "4 workers: 4.0 times as fast"),
        (2, Fed(0.06, 0.005), "right", "2 workers: 1.7 times as fast as before, waiting 8.3 % of each step"),
        (1, Fed(0.08, 0.06), "wrong", "1 worker: 1.25 times as fast as before, waiting 75 % of each step"),
        (1, Fed(0.08, 0.06), "wrong", "about 4 workers could keep up"),
        (0, Fed(0.1, 0.08), "wrong", "Which option lets other processes load them?"),
    ],
)
def test_a_loader_is_judged_by_what_it_brings(
    monkeypatch: pytest.MonkeyPatch, workers: int, mine: Fed, state: str, hint: str
) -> None:
    answer = loader(num_workers=workers)
    monkeypatch.setattr(starving, "_fed", lambda loader, train: mine if loader is answer else Fed(0.1, 0.08))
    checked = check_loader(answer, GIVEN, lambda loader: None)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_both_loaders_really_feed_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starving, "WANTED", math.inf)  # on a busy machine either may be the faster, by chance
    monkeypatch.setattr(starving, "HARDLY_WAITS", -1.0)
    fed: list[tuple[object, int]] = []

    def train(loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for epoch in range(4):
            fed.append((loader, epoch))
            for inputs, _ in loader:
                (inputs * parameter).sum().backward()
                optimizer.step()

    answer = loader()
    checked = check_loader(answer, GIVEN, train)
    assert checked.state == "wrong" and "one after the other" in checked.hint
    assert {GIVEN, answer} == {loader for loader, _ in fed}
    assert max(epoch for _, epoch in fed) < 3, "ended early, after the steps that count"


def test_a_training_that_fails_or_ends_too_early_is_named() -> None:
    def fails(loader: object) -> None:
        raise RuntimeError("broken <loader>")

    assert "RuntimeError: broken <loader>" in check_loader(loader(), GIVEN, fails).hint
    assert "too early to measure" in check_loader(loader(), GIVEN, lambda loader: None).hint


def test_distant_digits_repeat_and_take_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    digits = DistantDigits(fetch_ms=5, root=tmp_path / "digits")
    first, label = digits[100]
    assert torch.equal(first, digits[100][0]) and first.shape == (1, 32, 32) and first.dtype == torch.float32
    assert label == digits.labels[100]
    assert digits.labels == [int(path.parent.name) for path in digits.paths]
    assert len(digits) == len(digits.labels) == 599 and set(digits.labels) == set(range(10))
    assert slept == [0.005, 0.005]


# -- lesson 05 ---------------------------------------------------------------------------------------------------------


def test_digits_in_memory_come_in_whole_batches() -> None:
    digits = DigitsInMemory()
    pixels, labels = next(iter(DataLoader(digits, batch_size=16, collate_fn=whole_batch)))  # type: ignore[arg-type]
    assert pixels.shape == (16, 64) and labels.tolist() == digits.labels[:16].tolist()
    assert torch.equal(pixels[3], digits[3][0])
    assert len(digits) == 9 * 1797
    assert torch.equal(digits.pixels, DigitsInMemory().pixels)


def unfinished(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None: ...


def step_in_the_loop(
    model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Sequence[Batch]
) -> None:
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss_function(model(inputs), labels).backward()
        optimizer.step()


def no_step(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()


def not_divided(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    optimizer.zero_grad()
    for inputs, labels in batches:
        loss_function(model(inputs), labels).backward()
    optimizer.step()


def only_the_last(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        optimizer.zero_grad()
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.step()


def zeroed_too_late(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.zero_grad()
    optimizer.step()


def halved(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    optimizer.zero_grad()
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / 2).backward()
    optimizer.step()


def all_at_once(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    batch_size._as_one_batch(model, optimizer, loss_function, batches)


def broken(model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Batches) -> None:
    raise KeyError("labels")


def zeroed_at_the_end(
    model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, batches: Sequence[Batch]
) -> None:
    for inputs, labels in batches:
        (loss_function(model(inputs), labels) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (unfinished, "unanswered", "in place of the dots"),
        (step_in_the_loop, "wrong", "made 4 steps for 4 batches"),
        (no_step, "wrong", "call optimizer.step()"),
        (not_divided, "wrong", "4 times too far"),
        (only_the_last, "wrong", "throws away"),
        (never_zeroed, "wrong", "The first call is right, the second is not"),
        (zeroed_too_late, "wrong", "there were no gradients"),
        (halved, "wrong", "2.0 times as far"),
        (all_at_once, "wrong", "32 samples at once"),
        (broken, "wrong", "KeyError: 'labels'"),
        (zeroed_at_the_end, "right", "exactly as one batch of 32"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_accumulation_is_told_what_is_wrong_with_it(answer: object, state: str, hint: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    checked = check_accumulation(answer)  # type: ignore[arg-type]
    assert (checked.state, hint in checked.hint) == (state, True), checked
    assert torch.equal(torch.get_rng_state(), before), "the reader's random numbers are untouched"
