"""Each rule of `make lint` notices its fault, and where it stands."""

from __future__ import annotations

from pathlib import Path

from tests.lint import RULES, faults

LONG = "test_" + "x" * 56
TEN = "1 2 3 4 5 6 7 8 9 ten, "
LONGER = f"A {TEN}{TEN}b c d e f"
PAGE = "[a](there.md) [b](there.md#two-and-more) [c](https://x.y/z)\n```\n[d](in_code.md)\n```\n"
TREE = {
    "gpulab/__init__.py": '__version__ = "1.0"\n__all__ = ["Run", "Riddle"]\n',
    "gpulab/run.py": "class Run: ...\nclass Mystery: ...\nfound = 1  # a key of stored runs\n",
    "gpulab/step_runs.py": '# definitions.md, "Step" and\n# pitfalls.md,\n# "NVML", not definitions.md alone\n',
    "gpulab/views/__init__.py": "def f(found, *told, known=1, **made): found(known)\nself._known = 1\n",
    "gpulab/sphinx/a.py": "async def made(x, /): ...\nh = lambda found: 'We recieve it'\n"
    "'A docstring of the noise floor.'\nk = f'{h} times as long', 'noise_floor', 'cure'\n",
    "gpulab/views/run.py": f"'{LONGER}'\nf('{LONGER}</p>', f'A {TEN}{TEN}{{1}} b.')\n"
    f"g = f'A {TEN}{{1}} {TEN}{{2}} b c d. D, {TEN}'\n",
    "frontend/src/a.js": "// the cell as written\nsay('Give back');\n",
    "tests/test_a.py": f"def {LONG}(): ...\n",
    "docs/glossary.md": "| word | meaning |\n| run, step | one |\n| view, story, init, a | two |\n",
    "docs/definitions.md": "# Step\n",
    "docs/pitfalls.md": "# NVML\n",
    "docs/there.md": "# One\n## Two (and more)\nThe knob as\nwritten, `knob as written`.\n"
    f"\n{LONGER}, `a b`. B {TEN}.\n- {TEN}{TEN}[f](#one)\n- {TEN}\n\n| {LONGER} |\n```\n{LONGER}\n```\n",
    "docs/README.md": f"{PAGE}[e](missing.md)\n[f](there.md#three) [g](glossary.md) [h](definitions.md)\n",
    "README.md": "make test\n\n" * 60 + "make test\n",
    "CONTRIBUTING.md": "`make tea`\n## Find your way\n| `views/` |\n| `trace/` |\n",
    "Makefile": ".PHONY: test\ntest: lint ## tests\n.PHONY: lint\nlint:\n",
    "pyproject.toml": '[project]\nversion = "1.1"\ndependencies = ["torch>=3"]\n[project.optional-dependencies]\n'
    'demo = ["pynvml", "numpy>=1"]\n',
    "constraints.txt": "# pins\ntorch==2.13.0\npynvml==12.0\nnumpy>=2\n",
}
OF_THIS_CHECKOUT = {
    "findings_by_name",
    "list_of_findings",
    "formats_of_their_own",
    "options_in_the_guide",
    "hardware_table",
    "figures_of_accuracy",
    "pins_of_what_is_needed",
    "top_level",
}
NOTICED = f"""\
CONTRIBUTING.md:1: folders: trace/
CONTRIBUTING.md:1: make: tea, which is no target
Makefile:1: make: lint, which `make help` does not explain
README.md:121: front door: 121 lines
constraints.txt:1: pins: numpy>=1: no pin
constraints.txt:1: pins: torch>=3: 2.13.0
constraints.txt:4: pins: numpy>=2
docs/README.md:1: documents: pitfalls.md is listed 0 times
docs/README.md:5: link: missing.md
docs/README.md:6: link: there.md#three
docs/there.md:6: long sentence: A 1 2 3 4 5
docs/there.md:3: old word: as written: baseline
docs/there.md:3: old word: knob: NAME=VALUE, setting, fix
frontend/src/a.js:2: old word: Give back: potential saving
gpulab/__init__.py:1: pins: the version is not 1.1
gpulab/__init__.py:2: glossary: Riddle: riddle
gpulab/run.py:2: glossary: Mystery: mystery
gpulab/sphinx/a.py:1: glossary: sphinx: sphinx
gpulab/sphinx/a.py:1: participle: made
gpulab/sphinx/a.py:2: participle: found
gpulab/sphinx/a.py:2: spelling: recieve ==> receive
gpulab/sphinx/a.py:4: old word: times as long: speedup, 2× the time
gpulab/step_runs.py:3: citation: definitions.md, None
gpulab/views/run.py:3: long sentence: A 1 2 3 4 5
gpulab/views/__init__.py:1: participle: found
gpulab/views/__init__.py:1: participle: known
gpulab/views/__init__.py:1: participle: made
gpulab/views/__init__.py:1: participle: told
gpulab/views/__init__.py:2: participle: known
pyproject.toml:1: pins: pynvml is deprecated: nvidia-ml-py
tests/test_a.py:1: test name: {LONG}
"""


def test_each_rule_notices_its_fault_and_no_other(tmp_path: Path) -> None:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    rules = [(name, predicate, "") for name, predicate, _ in RULES if predicate.__name__ not in OF_THIS_CHECKOUT]
    noticed = {line.replace(": : ", ": ") for line in faults(tmp_path, rules)}
    assert sorted(noticed) == sorted(NOTICED.splitlines())
