"""What ruff does not know of wording and structure: names, headings, links, lists and figures of the documents.

`make lint` prints each fault as `file:line: rule: message` and exits with 1 where there is one.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import first_runs

ROOT = Path(__file__).resolve().parents[1]

Fault = tuple[Path, int, str]  # where, and what the rule's message names
Predicate = Callable[[Path], Iterable[Fault]]

DIALECT = frozenset({"found", "told", "known", "made"})  # past participles in place of a noun
KEYS_OF_STORED_RUNS = {("gpulab/run.py", "found")}
TEST_NAME_LENGTH = 60
README_LINES = 120
SENTENCE_WORDS = 25
TOP_LEVEL = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "benchmarks", "binder",
    "constraints.txt", "docs", "frontend", "gpulab", "notebooks", "planted", "pyproject.toml", "recordings", "tests",
}  # fmt: skip
SPELLED = (
    "README.md", "CHANGELOG.md", "docs", "notebooks/README.md", "notebooks/lessons", "benchmarks/README.md",
    "planted/README.md", "gpulab",
)  # fmt: skip
MEANT = "childs,ackward"  # names and a beginning of a word, within code
OLD_WORDS = {  # in what a user reads, and what the field says
    r"as written|reference run|the cell as found": "baseline",
    r"noise floor": "run-to-run noise",
    r"(times|×) as (fast|long|many|much)|(half|twice) as fast": "speedup, 2× the time",
    r"g[ia]v(e|es|en|ing) back": "potential saving",
    r"cannot be told": "unknown",
    r"costliest (operator|kernel)": "top operators",
    r"eight of ten|ms high": "p10-p90, y-max",
    r"takes? your CPU|processor core": "CPU contention, CPU core",
    r"compare no times|holds? the truth": "range, interval",
    r"KNOB=|\b(knob|cure)s?\b": "NAME=VALUE, setting, fix",
    r"\bunprofiled|\bprofiled (steps?|runs?|windows?|time)\b": "traced, untraced",
}
REFERENCE = {"definitions", "report-json", "compare-json", "climb-json"}  # read for one entry, not from the top
PAGES_OF_NAMES = {  # knob and cure are names of the API and of JSON
    "CONTRIBUTING.md", "docs/README.md", "docs/accuracy.md", "docs/extending.md", "docs/glossary.md",
}  # fmt: skip

READERS_OF_FINDINGS = (
    "diagnosis/diagnose.py", "diagnosis/headline.py", "diagnosis/ranks.py",
    "prediction/predict.py", "tuning/climb_policy.py", "views/report/findings.py", "views/climb.py",
)  # fmt: skip
WRITERS_OF_FIGURES = ("diagnosis/headline.py", "tuning/compare/headline.py", "views/wording.py")

_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_CITATION = re.compile(r'\b(definitions|pitfalls)\.md\b(?:,\s+(?:#\s+)?"([^"]+)")?')
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_SENTENCE = re.compile(r"[.!?][\")*]*\s+(?=[A-Z`*(\[\"%\0]|gpulab )|\n\s*\n|\n\s*(?:[-*]|\d+\.) |\s{3,}")
_CODE = re.compile(r"</|[{}]| = |\bimport |^\W*\w+( \w+)*$")  # and a list of names
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FROM_OUTPUTS = re.compile(r"<!-- measured: begin -->.*?<!-- measured: end -->", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


@cache
def sources(root: Path, *folders: str) -> tuple[Path, ...]:
    """The Python files of these folders."""
    skipped = {"node_modules", "results", "__pycache__"}
    paths = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return tuple(sorted(path for path in paths if skipped.isdisjoint(path.parts)))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def headings(page: Path) -> frozenset[str]:
    return frozenset(_HEADING.findall(_FENCED.sub("", text_of(page))))


def anchor(heading: str) -> str:
    """The fragment by which GitHub links a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# Names


@cache
def glossary(root: Path) -> frozenset[str]:
    """Every word in the first column of the glossary's tables."""
    first = re.findall(r"^\| ([^|]+) \|", text_of(root / "docs" / "glossary.md"), flags=re.MULTILINE)
    return frozenset(word for cell in first for word in re.findall(r"[a-z0-9]+", cell.lower())) - {"word"}


def unexplained(root: Path, name: str) -> str:
    """The words of `device_peaks` or `StepFlag` that the glossary lacks in singular and plural."""
    words = [word.lower() for word in _CAMEL.findall(name)]
    forms = {w: {w, f"{w}s", w.removesuffix("s"), w.removesuffix("es"), re.sub("ies$", "y", w)} for w in words}
    return ", ".join(word for word in words if glossary(root).isdisjoint(forms[word]))


def words_of_modules(root: Path) -> Iterator[Fault]:
    for path in sources(root, "gpulab"):
        for part in path.relative_to(root / "gpulab").with_suffix("").parts:
            if part not in ("__init__", "__main__") and (words := unexplained(root, part)):
                yield path, 1, f"{part}: {words}"


def words_of_the_api(root: Path) -> Iterator[Fault]:
    package, record = root / "gpulab" / "__init__.py", root / "gpulab" / "run.py"
    assigned = [node for node in tree_of(package).body if isinstance(node, ast.Assign)]
    listed = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__")
    names = [(package, listed.lineno, name) for name in ast.literal_eval(listed)]
    names += [(record, node.lineno, node.name) for node in tree_of(record).body if isinstance(node, ast.ClassDef)]
    for path, line, name in names:
        if words := unexplained(root, name):
            yield path, line, f"{name}: {words}"


def _name_of(node: ast.AST) -> str:
    """The variable, parameter, field, function or class that a node names; empty where it names none."""
    match node:
        case ast.arg():
            return node.arg
        case ast.Name(ctx=ast.Store()):
            return node.id
        case ast.Attribute(ctx=ast.Store()):
            return node.attr
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name
    return ""


def participles(root: Path) -> Iterator[Fault]:
    for path in sources(root, "gpulab"):
        for node in ast.walk(tree_of(path)):
            name = _name_of(node).strip("_")
            if name in DIALECT and (path.relative_to(root).as_posix(), name) not in KEYS_OF_STORED_RUNS:
                yield path, getattr(node, "lineno", 1), name


def long_names_of_tests(root: Path) -> Iterator[Fault]:
    for path in sources(root, "tests"):
        text = text_of(path)
        for match in re.finditer(r"def (test_\w+)", text):
            if len(match[1]) > TEST_NAME_LENGTH:
                yield path, line_of(text, match.start()), match[1]


def misspelled(root: Path) -> Iterator[Fault]:
    command = [sys.executable, "-m", "codespell_lib", "--skip", "*.js,*.pyc,data", "-L", MEANT]
    spelled = [name for name in SPELLED if (root / name).exists()]
    done = subprocess.run([*command, *spelled], cwd=root, capture_output=True, text=True, check=False)
    if done.stderr:
        yield root, 0, done.stderr
    for line in done.stdout.splitlines():
        file, number, words = line.split(":", 2)
        yield root / file, int(number), words.strip()


def findings_by_name(root: Path) -> Iterator[Fault]:
    """Who reads findings goes by their kind; only a rule's module has its key."""
    from gpulab.diagnosis.catalogue import kinds

    keys = {kind.key for kind in kinds()} - {"layout"}  # which is a class of kernels, too
    for path in (root / "gpulab" / name for name in READERS_OF_FINDINGS):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and node.value in keys:
                yield path, node.lineno, str(node.value)


def formats_of_their_own(root: Path) -> Iterator[Fault]:
    """A figure is written alike wherever it stands: by gpulab/formatting.py."""
    formats = {n.name for n in tree_of(root / "gpulab" / "formatting.py").body if isinstance(n, ast.FunctionDef)}
    for path in (root / "gpulab" / name for name in WRITERS_OF_FIGURES):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and node.name in formats | {"ms", "times", "times_within"}:
                yield path, node.lineno, node.name


# Documents


def pages(root: Path) -> list[Path]:
    named = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "notebooks/README.md")
    return [*(root / name for name in named if (root / name).exists()), *sorted((root / "docs").glob("*.md"))]


def citations(root: Path) -> Iterator[Fault]:
    cited = set()
    for path in sources(root, "gpulab", "benchmarks", "planted"):
        text = text_of(path)
        for match in _CITATION.finditer(text):
            cited.add(match[1])
            if match[2] not in headings(root / "docs" / f"{match[1]}.md"):
                yield path, line_of(text, match.start()), f"{match[1]}.md, {match[2]!r}"
    for page in {"definitions", "pitfalls"} - cited:
        yield root / "docs" / f"{page}.md", 1, "no code cites this page"


def links(root: Path) -> Iterator[Fault]:
    for page in pages(root):
        text = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text_of(page))
        for match in _LINK.finditer(text):
            path, _, fragment = match[1].partition("#")
            target = page.parent / path if path else page
            if "://" in match[1] or (target.exists() and not fragment):
                continue
            if not target.exists() or fragment not in map(anchor, headings(target)):
                yield page, line_of(text, match.start()), match[1]


def folders_in_contributing(root: Path) -> Iterator[Fault]:
    page = root / "CONTRIBUTING.md"
    table = text_of(page).partition("## Find your way")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)/`", table)) - {"gpulab"}
    for name in named ^ {path.parent.name for path in (root / "gpulab").glob("*/__init__.py")}:
        yield page, 1, f"{name}/"


def list_of_documents(root: Path) -> Iterator[Fault]:
    page = root / "docs" / "README.md"
    listed = re.findall(r"\]\(([\w-]+\.md)\)", text_of(page))
    for path in page.parent.glob("*.md"):
        if path != page and listed.count(path.name) != 1:
            yield page, 1, f"{path.name} is listed {listed.count(path.name)} times"


def length_of_readme(root: Path) -> Iterator[Fault]:
    page = root / "README.md"
    if (count := len(text_of(page).splitlines())) > README_LINES:
        yield page, count, f"{count} lines"


def make_targets(root: Path) -> Iterator[Fault]:
    makefile = root / "Makefile"
    text = text_of(makefile)
    targets = set(re.findall(r"^\.PHONY: ([\w-]+)$", text, flags=re.MULTILINE))
    for name in targets - set(re.findall(r"^([\w-]+):.*## \S", text, flags=re.MULTILINE)):
        yield makefile, 1, f"{name}, which `make help` does not explain"
    for page in (root / "README.md", root / "CONTRIBUTING.md"):
        for match in re.finditer(r"(?:^|`)make ([\w-]*\w)", text_of(page), flags=re.MULTILINE):
            if match[1] not in targets:
                yield page, line_of(text_of(page), match.start()), f"{match[1]}, which is no target"


def options_in_the_guide(root: Path) -> Iterator[Fault]:
    from gpulab.arguments import Parser
    from gpulab.commands import PROFILE

    page, options = root / "docs" / "using.md", set(Parser(PROFILE, "")._option_string_actions)
    cells = re.findall(r"^\| (`-[^|]+) \|", text_of(page), flags=re.MULTILINE)
    for option in {option for cell in cells for option in re.findall(r"`(-[\w-]+)", cell)} ^ options:
        yield page, 1, option


def list_of_findings(root: Path) -> Iterator[Fault]:
    from gpulab.diagnosis.catalogue import kinds

    page = root / "docs" / "findings.md"
    rows = "".join(re.findall(r"^\| (`.+?) \|", text_of(page), flags=re.MULTILINE))
    for key in set(re.findall(r"`(\w+)`", rows)) ^ {kind.key for kind in kinds()}:
        yield page, 1, key


def hardware_table(root: Path) -> Iterator[Fault]:
    from gpulab.analysis.device_peaks import Peaks, peaks_of

    page = root / "docs" / "definitions.md"
    section = text_of(page).partition("## Hardware table")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", section, flags=re.MULTILINE)[2:]]
    if len(rows) != 16:
        yield page, 1, f"{len(rows)} rows"
    for name, *figures in rows:
        peaks: list[float | None] = [None if figure == "–" else float(figure) for figure in figures]
        if Peaks(*peaks) != peaks_of(name):  # type: ignore[arg-type] # the first column is always a figure
            yield page, 1, name


def figures_of_accuracy(root: Path) -> Iterator[Fault]:
    """What docs/accuracy.md and the README sum up, from what the benchmarks keep."""
    page = root / "docs" / "accuracy.md"
    text, readme = text_of(page), text_of(root / "README.md")
    flat, kept = " ".join(text.split()), first_runs.kept()
    causes, right, healthy, alarms = (
        first_runs.summed(kept)[key] for key in ("with_cause", "right", "healthy", "false_alarms")
    )
    headline = f"{right} of {causes} headlines were right ({100 * right / causes:.0f} %)"
    wanted = [headline in flat, headline in " ".join(readme.split())]
    if not all([*wanted, f"false alarms on healthy cells: {alarms} of {healthy}" in flat]):
        yield page, 1, f"{headline}, {alarms} of {healthy}"
    runs = [entry["first_run"] for entry in kept if entry["first_run"]]
    errors = [f"{100 * run['median_error']:.0f}" for run in runs if run["median_error"] is not None]
    shown = re.search(r"at their first run \| ([\d %,]+) \|", text)
    if shown is None or re.findall(r"\d+", shown[1]) != errors:
        yield page, 1, f"errors at their first run: {', '.join(errors)}"
    for part, cells in (("aside", "held out"), ("tuned", "used to build the rules")):
        totals = json.loads(text_of(root / "benchmarks" / "results" / f"planted_{part}.json"))["totals"]
        headlines = f"{totals['headline_right']} of {totals['sick']} | {totals['false_alarms']} of {totals['healthy']}"
        held = f"{100 * totals['median_error']:.0f} % | {' of '.join(map(str, totals['interval_holds']))}"
        for end in (headlines, held):
            if not re.search(rf"^\| {cells}.* \| {end} \|$", text, re.MULTILINE):
                yield page, 1, f"{cells}: {end}"


def texts_for_users(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Pages, sentences in Python that are no docstrings, and lines of the front end that are no comments."""
    for page in [*pages(root), *sorted((root / "notebooks" / "lessons").glob("*.md"))]:
        if page.parent.name != "benchmarks":
            written = _FROM_OUTPUTS.sub(lambda block: "\n" * block[0].count("\n"), text_of(page))
            text = re.sub(r"`[^`\n]*`", lambda code: "`" * len(code[0]), written)
            yield page, 1, text
    for path in sources(root, "gpulab"):
        tree = tree_of(path)
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                yield path, node.lineno, node.value
    for path in sorted((root / "frontend" / "src").glob("*.js")):
        yield path, 1, re.sub(r"^\s*(//|/?\*).*$", "", text_of(path), flags=re.MULTILINE)


def old_words(root: Path) -> Iterator[Fault]:
    for path, line, text in texts_for_users(root):
        if " " not in text:
            continue  # a key
        for pattern, word in OLD_WORDS.items():
            if "knob" in pattern and path.relative_to(root).as_posix() in PAGES_OF_NAMES:
                continue
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
                yield path, line + text.count("\n", 0, match.start()), f"{' '.join(match[0].split())}: {word}"


def sentences_for_users(root: Path) -> Iterator[Fault]:
    """Sentences of the guides and of Python: no tables, no code. What is put in counts as one word."""
    for page in pages(root):
        if page.stem not in REFERENCE and page.parent.name != "benchmarks":
            text = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text_of(page))
            yield page, 1, re.sub(r"^[|#].*$|<!--.*-->|(?<=\])\([^)]*\)", "", text, flags=re.MULTILINE)
    for path in sources(root, "gpulab"):
        tree = tree_of(path)
        inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            words = [part.value if isinstance(part, ast.Constant) else "\0" for part in parts]
            if id(node) not in inside and isinstance(node, ast.JoinedStr | ast.Constant) and isinstance(words[0], str):
                inside |= set(map(id, parts))
                yield path, node.lineno, "".join(map(str, words))


def words_of_sentences(text: str) -> Iterator[tuple[int, list[str]]]:
    """Where each sentence begins, and its words."""
    ends = [match.end() for match in _SENTENCE.finditer(text)]
    for begin, end in zip([0, *ends], [*ends, len(text)], strict=True):
        if not _CODE.search(text[begin:end]):
            yield begin, re.findall(r"\S*[\w\0]\S*", text[begin:end])


def long_sentences(root: Path) -> Iterator[Fault]:
    for path, line, text in sentences_for_users(root):
        for begin, words in words_of_sentences(text):
            if len(words) > SENTENCE_WORDS:
                before = text.count("\n", 0, text.index(words[0], begin)) if path.suffix == ".md" else 0
                yield path, line + before, " ".join(words[:6])


# Packaging


def requirements(root: Path) -> list[Requirement]:
    project = tomllib.loads(text_of(root / "pyproject.toml"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group if not text.startswith("gpulab")]


def pinned(root: Path) -> dict[str, str]:
    lines = [line for line in text_of(root / "constraints.txt").splitlines() if "==" in line and line[0] != "#"]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def pins(root: Path) -> Iterator[Fault]:
    page, versions = root / "constraints.txt", pinned(root)
    for number, line in enumerate(text_of(page).splitlines(), start=1):
        if not re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line):
            yield page, number, line
    for requirement in requirements(root):
        name = canonicalize_name(requirement.name)
        if name not in versions or not requirement.specifier.contains(versions[name]):
            yield page, 1, f"{requirement}: {versions.get(name, 'no pin')}"
        if name == "pynvml":
            yield root / "pyproject.toml", 1, "pynvml is deprecated: nvidia-ml-py"
    version = tomllib.loads(text_of(root / "pyproject.toml"))["project"]["version"]
    if f'__version__ = "{version}"' not in text_of(root / "gpulab" / "__init__.py"):
        yield root / "gpulab" / "__init__.py", 1, f"the version is not {version}"


def pins_of_what_is_needed(root: Path) -> Iterator[Fault]:
    """Of all that the installed packages need in turn."""
    versions, seen = pinned(root), {"gpulab"}
    todo = [canonicalize_name(requirement.name) for requirement in requirements(root)]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in versions:
            yield root / "constraints.txt", 1, f"{name}: no pin"
        with suppress(importlib.metadata.PackageNotFoundError):
            for needed in map(Requirement, importlib.metadata.requires(name) or []):
                of_cuda = name == "torch" and needed.name.startswith(("nvidia-", "cuda-", "triton"))  # torch pins them
                if not of_cuda and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                    todo.append(canonicalize_name(needed.name))


def top_level(root: Path) -> Iterator[Fault]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    for name in {name.split("/")[0] for name in done.stdout.split("\0") if name} - TOP_LEVEL:
        yield root / name, 1, name


RULES: tuple[tuple[str, Predicate, str], ...] = (
    ("glossary", words_of_modules, "explain this word in docs/glossary.md, or use one that stands there"),
    ("glossary", words_of_the_api, "explain this word in docs/glossary.md, or use one that stands there"),
    ("participle", participles, "a name is a noun"),
    ("test name", long_names_of_tests, f"a test's name has at most {TEST_NAME_LENGTH} characters"),
    ("spelling", misspelled, "a misspelled word"),
    ("finding", findings_by_name, "who reads findings knows none by name"),
    ("format", formats_of_their_own, "gpulab/formatting.py writes figures, wherever they stand"),
    ("citation", citations, "cite a heading of the page, in quotes"),
    ("link", links, "it leads nowhere"),
    ("old word", old_words, "users read another word"),
    ("long sentence", long_sentences, f"at most {SENTENCE_WORDS} words"),
    ("folders", folders_in_contributing, "the table of folders and the folders of gpulab differ"),
    ("documents", list_of_documents, "each document is listed once"),
    ("front door", length_of_readme, f"at most {README_LINES} lines"),
    ("make", make_targets, "documents name targets, and make help explains each"),
    ("findings", list_of_findings, "the page of findings has each kind, and no other"),
    ("options", options_in_the_guide, "the guide explains each option of the magic, and no other"),
    ("hardware", hardware_table, "the table of the page is the one that the code uses"),
    ("accuracy", figures_of_accuracy, "the page sums up what the benchmarks measured"),
    ("pins", pins, "versions, pinned within the ranges of pyproject.toml"),
    ("pins", pins_of_what_is_needed, "each package that is installed has a pin"),
    ("top level", top_level, "a run has left this, or it belongs into a folder"),
)


def faults(root: Path, rules: Iterable[tuple[str, Predicate, str]] = RULES) -> Iterator[str]:
    for name, predicate, message in rules:
        for path, line, what in predicate(root):
            yield f"{path.relative_to(root)}:{line}: {name}: {message}: {what}"


if __name__ == "__main__":
    lines = sorted(faults(ROOT))
    print("\n".join(lines) or f"wording and structure: {len(RULES)} rules hold")
    sys.exit(bool(lines))
