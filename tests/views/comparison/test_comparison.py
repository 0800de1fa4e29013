"""Every view of a comparison against made-up ones: what is shown, what is escaped, and that all say the same."""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from msgspec.structs import replace

import gpulab
from gpulab import cli
from gpulab.diagnosis.headline import Headline
from gpulab.errors import UsageError
from gpulab.prediction.prediction import Prediction
from gpulab.run import Change
from gpulab.store.folders import Store
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.views import text as terminal
from gpulab.views.comparison.comparison import Compared
from gpulab.views.interval_places import factor_ticks
from gpulab.views.layout import Column, Row, Section
from tests.support import comparisons as made
from tests.support.paths import ROOT
from tests.support.synthetic import HOSTILE
from tests.views.report.test_report import _Reader, controls

DOCUMENTED = ROOT / "docs" / "compare-json.md"


def hostile() -> Comparison:
    """Every text that a user or a knob can choose holds markup, escapes and mathtext."""
    check = Change(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "took effect", HOSTILE)
    b = made.faster(label=HOSTILE, settings={HOSTILE: HOSTILE}, checks=(check,), edit=f"-{HOSTILE}\n+{HOSTILE}")
    found = made.a_comparison(b)
    assert found.loss is not None
    return replace(
        found,
        differences=(HOSTILE,),
        notes=(HOSTILE,),
        restored=HOSTILE,
        loss=replace(found.loss, words=HOSTILE),
    )


def nothing() -> Comparison:
    """A comparison in which nothing could be measured."""
    return made.a_comparison(made.out_of_memory(), made.as_written(facts=None, blocks=(), losses=()))


@functools.cache
def every() -> dict[str, Compared]:
    """Each kind of comparison."""
    seeds = made.as_written(seed_losses=tuple(made.loss_curve(seed=s) for s in (1, 2, 3)))
    nan = made.faster(losses=(2.0, math.nan, math.inf, 1.0))
    found: dict[str, Comparison | Experiment] = {
        "faster": made.a_comparison(),
        "alike": made.a_comparison(made.alike()),
        "seeds": made.a_comparison(made.faster(losses=made.loss_curve(seed=9)), seeds),
        "nan": made.a_comparison(nan),
        "sweep": made.a_sweep(),
        "one": Experiment((made.as_written(), made.faster()), (made.a_comparison(),), 3.0, notes=("Said of all.",)),
        "none": Experiment((made.as_written(),), (), 0.1, stopped=True),
        "hostile": hostile(),
        "nothing": nothing(),
    }
    return {name: Compared(one) for name, one in found.items()}


EVERY = pytest.mark.parametrize(
    "name", ["faster", "alike", "seeds", "nan", "sweep", "one", "none", "hostile", "nothing"]
)


@EVERY
def test_every_view_of_every_comparison(name: str) -> None:
    shown = every()[name]
    text, page, fragment = shown.text(full=True), shown.html(), shown.fragment()
    assert not controls(text)
    assert all(len(line) <= 100 for line in text.split("KEEP IT")[0].splitlines())
    for markup in (page, fragment):
        assert not controls(markup)
        read = _Reader(markup)
        assert not read.open
        assert "script" not in read.tags and not any(key.startswith("on") for key, _ in read.attributes)
    assert 'src="http' not in page and "Content-Security-Policy" in page
    assert json.loads(json.dumps(shown.json(), allow_nan=False))["schema"] == 1
    width, height = struct.unpack(">II", shown.png()[16:24])
    assert width == 1100 and (80 if name == "nothing" else 250) < height < 1300
    assert shown.headline.sentence in " ".join(text.split()) or name == "hostile"


def test_text_says_how_it_was_measured_and_how_to_keep_it() -> None:
    text = Compared(made.a_comparison()).text(full=True)
    flat = " ".join(text.split())
    for expected in (
        "20 pairs of blocks, in turn and in random order",
        "steps counted in a block 10",
        "steps left out: warm-up and others 3",
        "weights, optimizer state, random numbers, data order",
        "took effect: 2 worker processes gave 120 batches",
        "a step, without the profiler 37.9 ms",
        "noise floor 0.4 %",
        "Not measurable on either side: energy of a million samples.",
    ):
        assert expected in flat, expected
    assert text.endswith(made.DIFF + "\n")


def test_an_edit_that_changes_the_losses_says_so() -> None:
    other = made.faster(losses=made.loss_curve(seed=9))
    for b, differ in ((other, True), (made.faster(), False)):
        text = Compared(made.a_comparison(b)).text()
        assert "KEEP IT" in text
        assert ("The losses of the two differ: look at them before you keep it." in text) is differ


def test_narrow_text_stays_narrow() -> None:
    for found in (made.a_comparison(), made.a_sweep()):
        text = Compared(found).text(60)
        assert max(len(line) for line in text.split("KEEP IT")[0].splitlines()) <= 60


def test_a_line_says_whose_each_figure_is() -> None:
    """Per sample where the batch differs: a step of a larger batch is longer, and no slower."""
    lines = Compared(made.a_comparison()).text().splitlines()
    beside = next(line for line in lines if line.startswith("  Side by side: "))
    assert beside.startswith("  Side by side: a step, ") and "(as written), " in beside and "(workers=2)" in beside
    lines = Compared(made.a_comparison(made.batch(64, 40.0, 3))).text().splitlines()
    beside = next(line for line in lines if line.startswith("  Side by side: "))
    assert beside.startswith("  Side by side: a sample: "), beside


def test_sequential_evidence_stands_on_top() -> None:
    shown = gpulab.compare(made.run_of(made.as_written()), made.run_of(made.faster()))
    text = shown.text(full=True)
    assert text.index("BEFORE YOU RELY ON THIS") < text.index("SIDE BY SIDE")
    assert "These runs were made one after the other" in text
    assert "Other number of workers of the DataLoader: 0 and 2." in text
    assert "BEFORE YOU RELY ON THIS" not in Compared(made.a_comparison()).text(full=True)


def test_a_sweep_has_one_line_per_setting() -> None:
    text = Compared(made.a_sweep()).text(full=True)
    for label in ("the cell as written", "batch_size=64", "batch_size=128", "batch_size=256"):
        assert re.search(rf"^  {label} +[\d.]+ [mµ]s +[\d.–]+ +[\d.–]+ +900 MiB", text, re.MULTILINE), label
    failed = text[text.index("batch_size=4096    ") :].split("\n")
    assert "out of memory at 3.1 GiB" in " ".join(failed[:2])
    assert text.rstrip().endswith("DataLoader(data, batch_size=256)")


REFUSED = "the dataset has 512 items; the largest is batch_size=512"


def refused(**changes: Any) -> Side:
    side = made.batch(100_000, 20.0, seed=4)
    return replace(side, facts=None, blocks=(), losses=(), failure=REFUSED, **changes)


def test_a_setting_that_failed_is_one_sentence_with_its_reason() -> None:
    shown = Compared(made.a_comparison(refused()))
    text, page = " ".join(shown.text(full=True).split()), shown.html()
    assert text.count(REFUSED) == 1 and len(shown.text(full=True).splitlines()) < 8
    assert "KEEP IT" not in text and "Keep it" not in page and "<img" not in page and "<table" not in page
    assert shown.json()["b"]["edit"] is None  # type: ignore[index]
    other = refused(label="batch_size=200000")
    compared = tuple(made.a_comparison(b) for b in (refused(), other))
    many = Compared(Experiment((made.as_written(), refused(), other), compared, 1.0))
    assert " ".join(many.text(full=True).split()).count(REFUSED) == 1 and "<table" not in many.html()
    assert f"batch_size=100000, batch_size=200000: {REFUSED}." in many.headline.evidence


def test_what_had_no_effect_is_not_to_be_kept() -> None:
    check = Change("channels_last", "on", "off", "module call", "no effect", "nothing to lay out")
    without = Compared(made.a_comparison(made.alike(checks=(check,))))
    assert "KEEP IT" not in without.text(full=True) and without.json()["b"]["edit"] is None  # type: ignore[index]
    beside = made.faster(checks=(check, *made.faster().checks))
    assert "KEEP IT" in Compared(made.a_comparison(beside)).text(full=True)


def test_only_what_ran_out_of_memory_is_marked_so() -> None:
    from matplotlib.figure import Figure

    from gpulab.views.comparison import sweep_figure

    axes = Figure().add_subplot()
    sweep_figure._memory(axes, (made.as_written(), refused(), made.out_of_memory()))
    assert [text.get_text() for text in axes.texts] == ["900 MiB", "–", "out of memory"]


def test_short_words_stand_beside_their_row() -> None:
    columns = (Column("setting"), Column("", "wrap"), Column("", "wrap"))
    told = terminal.render("", Headline("", "", "", ""), [Section("T", columns, (Row(("workers=2", "x", "faster")),))])
    assert "  workers=2  x  faster\n" in told


def test_points_avoid_names_and_long_labels_break_at_the_sign() -> None:
    import numpy as np
    from matplotlib.figure import Figure

    from gpulab.views.comparison import figure_panels as panels

    axes = Figure().add_subplot()
    noisy = made.a_comparison(made.alike(blocks=made.blocks(1, 38.0, noise=0.03)))
    panels.speeds(axes, noisy)
    bottom, top = np.log(axes.get_ylim())
    points = [y for line in axes.lines for y in np.log(np.asarray(line.get_ydata(), float))]
    assert max(y for y in points if bottom < y < top) <= bottom + (top - bottom) * 1.1 / 1.46 + 1e-9
    axes = Figure().add_subplot()
    panels.stacked_bars(axes, [{}], [("B  batch_size=100000", "black")])
    assert axes.get_yticklabels()[0].get_text() == "B  batch_size=\n100000"


def test_price_adds_cost() -> None:
    found = made.a_comparison()
    text = Compared(found, 2.5).text(full=True)
    assert "cost of a million samples, at 2.5 an hour" in text and "device time" not in text, "there is no GPU"
    assert "cost" not in Compared(found).text(full=True)


def test_the_object_has_what_a_program_asks_for() -> None:
    found = made.a_comparison()
    shown = Compared(found)
    assert (shown.verdict, shown.ratio, shown.interval) == (found.verdict, found.ratio, found.interval)
    assert (shown.noise_floor, shown.parts, shown.loss) == (found.noise_floor, found.parts, found.loss)
    assert Compared(Experiment((found.a, found.b), (found,), 1.0)).ratio == found.ratio
    with pytest.raises(UsageError, match="5 settings"):
        Compared(made.a_sweep()).verdict  # noqa: B018
    bundle = shown._repr_mimebundle_()
    assert {"text/plain", "text/html"} == set(bundle), "no picture beside the one in the HTML"
    assert repr(shown).startswith("<Compared: Faster: workers=2 is 2.9")


def test_the_document_is_the_documented_one() -> None:
    """Each key of the JSON stands in the page about it, and each key there in the JSON."""
    cells = re.findall(r"^\| (`[^|]+`) \|", DOCUMENTED.read_text(), re.MULTILINE)
    told = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    predicted = made.faster(prediction=Prediction({"workers": "2"}, 0.4, (0.3, 0.5), "because"))
    one, many = Compared(made.a_comparison(predicted)).json(), Compared(made.a_sweep()).json()
    side, loss, parts = one["a"], one["loss"], one["parts"]
    assert isinstance(side, dict) and isinstance(loss, dict) and isinstance(parts, list)
    blocks, checks = side["blocks"], one["b"]["checks"]  # type: ignore[index]
    assert isinstance(blocks, list)
    found = {*one, *many, *side, *loss, *parts[0], *blocks[0], *checks[0], *side["per_million_samples"]}
    found |= {*one["b"]["prediction"]}  # type: ignore[index]
    assert found == told


def test_an_infinite_loss_is_told_in_json() -> None:
    loss = every()["nan"].json()["loss"]
    assert isinstance(loss, dict) and loss["b"] == [2.0, None, "inf", 1.0]
    assert "infinite from step 3 on" in loss["words"] or "not a number from step 2 on" in loss["words"]


@pytest.mark.parametrize("name", ["faster", "alike", "seeds", "sweep", "hostile"])
def test_the_picture_writes_nothing_over_its_edge(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    start = Figure.__init__

    def remember(self: Figure, *args: object, **kwargs: object) -> None:
        start(self, *args, **kwargs)  # type: ignore[arg-type]
        figures.append(self)

    with monkeypatch.context() as patched:
        patched.setattr(Figure, "__init__", remember)
        every()[name].png()
    (figure,) = figures
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        tick_outside = re.fullmatch(r"[−\d.]*", text.get_text())  # matplotlib keeps some that it does not draw
        if text.get_visible() and not tick_outside:
            box = text.get_window_extent(renderer)
            assert box.x0 >= -1 and box.x1 <= 1101 and box.y0 >= -1, text.get_text()


def test_bars_are_as_long_as_their_steps() -> None:
    import numpy as np
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    from gpulab.views.comparison import figure_panels as panels

    axes = Figure().add_subplot()
    panels.bars(axes, made.a_comparison())
    ends = [
        np.asarray(path.vertices)[:, 0].max()
        for c in axes.collections
        if isinstance(c, PolyCollection)
        for path in c.get_paths()
    ]
    found = made.a_comparison()
    assert found.a.us_per_step and found.b.us_per_step
    assert np.isclose(max(ends), found.a.us_per_step / 1e3)
    assert any(np.isclose(end, found.b.us_per_step / 1e3) for end in ends)


def noisy(**changes: Any) -> Comparison:
    """Blocks of a busy machine, which decide nothing, and profiled runs that differ otherwise."""
    a = made.as_written(blocks=made.blocks(0, 38.0, per_turn=2, noise=0.8))
    return made.a_comparison(made.faster(blocks=made.blocks(1, 30.0, noise=0.8), **changes), a)


def test_nothing_but_the_blocks_has_a_ratio() -> None:
    """Headline, table and JSON of an undecided comparison: one figure, one verdict, no part that explains it."""
    shown = Compared(noisy())
    text, figures = " ".join(shown.text(full=True).split()), shown.json()
    assert shown.verdict == figures["verdict"] == "undecided" and shown.headline.key == "undecided"
    assert text.count("Undecided: ") == 2 and "no measurable difference where" in text
    assert f"{shown.times_as_fast:.1f} times as fast per step, but" in shown.headline.sentence
    assert figures["times_as_fast"] == shown.times_as_fast
    a, b = figures["a"], figures["b"]
    assert a["us_per_step"] / b["us_per_step"] == pytest.approx(shown.times_as_fast)  # type: ignore[index]
    assert "shrank" not in text and "Left out, because one profiled run of each and the blocks do not agree" in text
    assert "one profiled run of each" in text and "KEEP IT" not in text and b["edit"] is None  # type: ignore[index]


def test_only_what_is_faster_is_to_be_kept() -> None:
    slower = made.a_comparison(made.faster(blocks=made.blocks(1, 76.0)))
    alike = made.a_comparison(made.alike())
    for found in (noisy(), slower, alike):
        assert "KEEP IT" not in Compared(found).text(), found.verdict
    assert "KEEP IT" in Compared(made.a_comparison()).text()


@pytest.mark.parametrize("ratio", [0.4, 1.0, 3.0])
def test_what_decides_nothing_is_no_hit(ratio: float) -> None:
    """Any prediction lies between 0.6 and 2.0 times as fast."""
    told = Prediction({"workers": "2"}, ratio, (ratio / 1.2, ratio * 1.2), "because")
    text = " ".join(Compared(noisy(prediction=told)).text(full=True).split())
    assert "as predicted" not in text and "than predicted" not in text
    held = replace(told, ratio=0.345, interval=(0.3, 0.4))
    assert "as predicted" in Compared(made.a_comparison(made.faster(prediction=held))).text()


def test_no_axis_of_speeds_reaches_zero() -> None:
    from matplotlib.figure import Figure

    from gpulab.views.comparison import figure_panels as panels
    from gpulab.views.comparison import sweep_figure

    wild = replace(noisy(), noise_floor=6.39)
    for _ in range(2):
        axes = Figure().add_subplot()
        panels.speeds(axes, wild)
        assert 0 < axes.get_ylim()[0] < 1 / 7 and axes.get_yscale() == "log"
        across = Figure().add_subplot()
        sweep_figure._speeds(across, Experiment((wild.a, wild.b), (wild,), 1.0), 2)
        assert 0 < across.get_xlim()[0] < 1 / 7 and across.get_xscale() == "log"
    assert factor_ticks(0.04, 6.0) == [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    assert 1.0 in factor_ticks(0.97, 1.04) and factor_ticks(0.7, 4.0) == [1.0, 2.0, 3.0, 4.0]


def test_the_figure_of_a_bar_stands_behind_it() -> None:
    """The time of a side, and the peak of its memory: neither crosses the edge of its bar."""
    from matplotlib.figure import Figure

    from gpulab.views.comparison import figure_panels as panels
    from gpulab.views.comparison import sweep_figure

    axes = Figure().add_subplot()
    panels.stacked_bars(axes, [{"compute": 100.0}, {"compute": 5.0}], [("a", "black"), ("b", "black")])
    assert [t.xy[0] for t in axes.texts] == [100.0, 5.0]  # type: ignore[attr-defined]
    axes = Figure().add_subplot()
    sweep_figure._memory(axes, (made.as_written(),))
    assert axes.texts[0].get_position()[0] > axes.patches[0].get_width()  # type: ignore[attr-defined]


# the command line and the door


@pytest.fixture
def stored() -> Store:
    store = Store()
    store.save(made.run_of(made.as_written(facts=made.facts_with(38.0, made.PARTS_A, seed=1, name="before"))))
    shares = {"data_wait": 0.02, "compute": 0.8}
    store.save(made.run_of(made.faster(facts=made.facts_with(13.0, shares, workers=2, seed=2, name="after"))))
    return store


def test_compare_prints_stored_runs_by_name(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "before", "after"]) == 0
    out = capsys.readouterr().out
    assert (
        "Faster: after is 2.9" in out
        and " times as fast as before per step" in out
        and "BEFORE YOU RELY ON THIS" in out
    )
    assert gpulab.compare("before", "after").verdict == "faster"


def test_compare_writes_json_and_a_page(stored: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "before", "20260801-000002", "--json", "--price-per-hour", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kind"] == "comparison" and figures["ratio"] == pytest.approx(13 / 38, rel=0.02)
    assert figures["b"]["per_million_samples"]["cost"] == pytest.approx(2 * 13e-3 / 32 * 1e6 / 3600, rel=0.02)
    page = tmp_path / "both.html"
    assert cli.main(["compare", "before", "after", "after", "--html", str(page)]) == 0
    assert "both.html" in capsys.readouterr().out
    assert "is the fastest of 3 settings" in page.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "before"], "A comparison needs two runs"),
        (["compare"], "RUN is missing. Write `gpulab compare"),
        (["compare", "before", "gone"], "gone"),
        (["compare", "before", "no/such.json"], "There is no file or folder 'no/such.json'"),
        (["compare", "before", "after", "--json", "--html", "x.html"], "argument --html: not allowed with"),
        (["compare", "before", "after", "--price-per-hour", "-2"], "argument --price-per-hour: '-2' is not a price"),
    ],
)
def test_wrong_usage_is_one_line(
    stored: Store, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and message in error, error
