# gpulab: every command a user or CI needs. The same lines run locally and in CI.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
LAB_FLAGS ?=
FILE ?=
# another PyTorch than the pinned one, e.g. TORCH=2.6.0: what it needs itself is then not pinned
TORCH ?=
BIN := $(VENV)/bin
PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --root-user-action ignore $(PIP_FLAGS)
# pip is silent for minutes: a dot every two seconds and for each package, what is large by name, and errors
TOLD := | { while sleep 2 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do printf .; done & while read -r line; do case $$line in Collecting*|Processing*) printf . ;; Downloading*[0-9][0-9].[0-9]' MB'*) printf ' %s ' "$$line" ;; 'Installing collected'*) set -- $$line; printf ' Installing %d packages ' $$(( $$\# - 3 )) ;; esac; done; kill $$!; echo; }
CORE := $(VENV)/.stamp-created
DEMO := $(VENV)/.stamp-demo
LAB := $(VENV)/.stamp-lab
TEST := $(VENV)/.stamp-test
OLD_KERNEL := $(VENV)/share/gpulab-ipykernel6
HTML_MANAGER := $(VENV)/share/gpulab-html-manager
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations 10 --durations-min 1
# more than cores: tests wait, for a sleep that is planted, for a rank, for a kernel
UNIT := --ignore tests/gpu --ignore tests/browser -n 3 --dist loadfile --no-loadscope-reorder

KEEP_GOING = $(findstring k,$(filter-out --%,$(firstword $(MAKEFLAGS))))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# `make -j` changes nothing: `make test` alone runs parts side by side, which share two cores
.NOTPARALLEL:
# tests start some hundred Pythons: without bytecode each would compile gpulab again
unexport PYTHONDONTWRITEBYTECODE
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

.PHONY: help
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(DEMO) ## profile a real training cell, print the report, write gpulab-demo.html
	$(BIN)/python -m gpulab.demo --html gpulab-demo.html

.PHONY: lab
lab: $(LAB) ## open JupyterLab on your copy of the lessons: LESSON=03 (LAB_FLAGS=--allow-root as root, --no-browser on a server)
	$(BIN)/gpulab lab --lesson $(or $(LESSON),00) -- $(LAB_FLAGS)

.PHONY: test
test: $(if $(FILE),$(if $(filter tests/browser%,$(FILE)),browser,unit),side-by-side) ## what CI runs: lint, types, floors beside unit beside browser; make test FILE=tests/test_cli.py: one file

# The browser's tests wait for most of their time, and mypy is one process: two cores have room for them beside unit.
# Each part is a process group of its own, which Ctrl-C ends. Only unit writes at once, the others when it has ended;
# but lint, types or floors end all where they fail, without --keep-going.
.PHONY: side-by-side checks
side-by-side: $(TEST)
	@logs=$$(mktemp -d); set -m; \
	$(MAKE) --no-print-directory checks >$$logs/checks 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory browser >$$logs/browser 2>&1 & browser=$$!; \
	$(MAKE) --no-print-directory unit </dev/null & unit=$$!; \
	set +m; \
	stop() { kill -INT -- -$$checks -$$browser -$$unit 2>/dev/null || true; wait || true; rm -rf $$logs; }; \
	trap 'stop; exit 130' INT TERM; \
	failed=; \
	wait $$checks || failed=' lint, types or floors'; \
	if [ -n "$$failed" ] && [ -z '$(KEEP_GOING)' ]; then cat $$logs/checks; stop; exit 1; fi; \
	wait $$unit || failed+=' unit'; \
	cat $$logs/checks; \
	wait $$browser || failed+=' browser'; \
	cat $$logs/browser; rm -rf $$logs; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

checks: lint types floors

.PHONY: lint
lint: $(TEST) ## ruff and tests.lint: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.lint

.PHONY: types
types: $(TEST) ## mypy --strict, of the package and its tests
	$(BIN)/mypy

.PHONY: floors
floors: $(TEST) ## import-linter: a module imports only from floors below
	$(BIN)/lint-imports

.PHONY: unit
unit: $(TEST) ## pytest without a browser, three processes; make unit FILE=tests/test_cli.py: one file
	$(PYTEST) -m "not browser" $(or $(FILE),$(UNIT))

.PHONY: coverage
coverage: $(TEST) ## the same, and which lines of gpulab it ran: the table, and htmlcov/index.html
	$(PYTEST) -m "not browser" $(UNIT) \
	  --cov gpulab --cov-report html --cov-report term:skip-covered

.PHONY: oldest
oldest: ## unit with the oldest PyTorch that gpulab takes, in .venv-oldest (PyPI's build: 5 GB)
	$(MAKE) unit VENV=.venv-oldest TORCH=2.6.0

.PHONY: newest
newest: ## unit with the newest PyTorch, in .venv-newest (5 GB): make newest PYTHON=python3.13
	$(MAKE) unit VENV=.venv-newest 'TORCH=2.*'

.PHONY: browser
browser: $(TEST) ## pytest in JupyterLab and Chromium (CHROMIUM=path, else /usr/bin/chromium)
	$(PYTEST) -m browser $(or $(FILE),tests/browser)

.PHONY: gpu
gpu: ## pytest on an NVIDIA GPU, in PYTHON as it is (core dependencies and pytest)
	$(PYTHON) -m pytest tests/gpu -rs

.PHONY: gpu-first
gpu-first: ## the first ten minutes on an NVIDIA GPU, in PYTHON as it is: make gpu-first OUT=folder
	$(PYTHON) -m benchmarks.gpu_first --out $(or $(OUT),$(error name the folder: make gpu-first OUT=folder))

.PHONY: record-gpu
record-gpu: ## the lessons' recordings on an NVIDIA GPU, in PYTHON as it is: make record-gpu OUT=folder; again to go on
	$(PYTHON) -m benchmarks.record_gpu --out $(or $(OUT),$(error name the folder: make record-gpu OUT=folder))

.PHONY: bench
bench: $(TEST) .venv-peers ## measure gpulab beside its peers, write benchmarks/results
	$(BIN)/python -m benchmarks

.PHONY: parity
parity: $(TEST) ## climbs of public trainings beside a search over all knobs; again to go on: make parity CHECKOUTS=folder
	GPULAB_PARITY_CHECKOUTS=$(or $(CHECKOUTS),$(error name the folder: make parity CHECKOUTS=folder)) $(BIN)/python -m benchmarks parity

.PHONY: notebooks
notebooks: $(TEST) ## make the lessons' notebooks from their texts, run them, keep what they show: LESSON=03 for one
	$(BIN)/python notebooks/execute.py $(LESSON)

.PHONY: book
book: $(TEST) ## the lessons with their outputs, the documentation and the reference as a static site: build/book/html
	$(BIN)/python -m sphinx -b html -c docs/book -W --keep-going -q . build/book/html
	@echo 'open build/book/html/docs/book/index.html'

.PHONY: golden
golden: $(TEST) ## recompute the golden answers, one line for each difference: make golden ACCEPT=1 keeps the new ones
	OMP_NUM_THREADS=1 $(BIN)/python -m planted.golden $(if $(ACCEPT),--accept)

.PHONY: ablate
ablate: $(TEST) ## cells that each special case of the rules serves, from stored runs: make ablate STORE=folder
	$(BIN)/python -m benchmarks.ablate $(or $(STORE),$(error name the folder: make ablate STORE=folder))

.PHONY: mutants
mutants: $(TEST) ## faults made on purpose, which the tests must catch: make mutants NAME='part of a name'; BEFORE=checkout
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants '$(NAME)' $(if $(BEFORE),--before $(BEFORE))

.venv-peers: benchmarks/peers-requirements.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -r $<
	touch $@

.PHONY: record
record: $(DEMO) ## profile a script: make record SCRIPT=train.py ARGS="..."
	$(BIN)/gpulab record $(or $(SCRIPT),$(error name the script: make record SCRIPT=train.py)) $(ARGS)

.PHONY: clean
clean: ## remove the environment and caches; recorded runs stay
	rm -rf $(VENV) build dist htmlcov *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f gpulab-demo.html
	find gpulab tests benchmarks planted -name __pycache__ -prune -exec rm -rf {} +

$(CORE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'gpulab needs Python 3.11 or newer: make PYTHON=python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/constraints.txt: $(CORE) constraints.txt
	{ grep -vE '^(torch|triton|sympy|networkx|setuptools)==' constraints.txt; echo 'torch==$(TORCH)'; } > $@

$(DEMO): $(CORE) pyproject.toml $(PINS)
	@echo 'installing into $(VENV): the first time takes minutes'
	@$(PIP) -c $(PINS) -e '.[demo]' $(TOLD)
	touch $@

$(LAB): $(CORE) pyproject.toml $(PINS)
	@echo 'installing into $(VENV): the first time takes minutes'
	@$(PIP) -c $(PINS) -e '.[demo,lab]' $(TOLD)
	touch $@

# ipykernel 6 is what many users still run: a kernelspec for the tests, the same packages but for the kernel itself.
$(TEST): $(CORE) pyproject.toml $(PINS)
	@echo 'installing into $(VENV): the first time takes minutes'
	@$(PIP) -c $(PINS) -e '.[demo,fast,lab,test,dev]' $(TOLD)
	rm -rf $(OLD_KERNEL)
	@$(PIP) --no-deps --target $(OLD_KERNEL) ipykernel==6.31.0 nest-asyncio==1.6.0 $(TOLD)
	PYTHONPATH="$(abspath $(OLD_KERNEL))" $(BIN)/python -m ipykernel install --prefix $(VENV) \
	  --name gpulab-ipykernel6 --display-name 'Python 3 (ipykernel 6.31)' --env PYTHONPATH "$(abspath $(OLD_KERNEL))"
	@# with Node, JupyterHub has its proxy, and its tests can run
	@if command -v npm >/dev/null; then npm install --prefix $(VENV)/share/gpulab-hub --no-audit --no-fund --silent configurable-http-proxy@5.3.0; fi
	@# with Node, the bench can be tested in what nbviewer, VS Code and Colab draw widgets with
	@if command -v npm >/dev/null; then mkdir -p $(HTML_MANAGER) && (cd $(HTML_MANAGER) && npm pack --silent @jupyter-widgets/html-manager@1.0.15 >/dev/null && tar xzf *.tgz package/dist/embed-amd.js && rm *.tgz); fi
	@# with Node, the test that a rebuild of the live view's module gives the same bytes can run
	@if command -v npm >/dev/null; then npm ci --prefix frontend --ignore-scripts --no-audit --no-fund --silent; fi
	touch $@ $(DEMO) $(LAB)
