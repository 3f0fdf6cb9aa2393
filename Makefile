# `make demo` and `make test` do all of their own set-up.
#   PYTHON      the interpreter that makes the virtual environment (3.11 or newer)
#   TORCH_INDEX a wheel index with CPU-only builds of torch, to keep pip from pulling a CUDA build
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS := 1

.PHONY: demo up test test-long test-compose mutants lint types layers check schemas clean

demo: $(VENV)/.worker
	$(BIN)/pdmesh demo

up: $(VENV)/.worker
	$(BIN)/pdmesh up --model models/tiny --prefill tp=2 --decode tp=1

# Three processes, on however many cores: much of a test's time is waiting, and each process has a mesh of its own running.
test: $(VENV)/.dev
	$(BIN)/pytest -n 3 -m "not long" --timeout 300

test-long: $(VENV)/.dev
	$(BIN)/pytest -n 3

# The compose stack on real containers, with the docker daemon that answers; on Debian, root needs none (compose/README.md).
test-compose: $(VENV)/.dev
	$(BIN)/python -m compose.smoke

# Every core, with one small mistake after another: an hour or more. `mutants/` keeps the verdicts, so that a second run goes on.
mutants: $(VENV)/.dev
	$(PIP) --editable '.[mutation]'
	$(BIN)/mutmut run --max-children 2
	$(BIN)/python -m tests.mutation.report

check: lint types layers

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

# After a change of the contracts: the schemas and the AsyncAPI document in docs, and the golden messages.
schemas: $(VENV)/.dev
	$(BIN)/python -m common.schemas docs
	$(BIN)/python -m tests.contract.golden_messages

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdmesh needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that an index for it never decides about anything else.
$(VENV)/.torch: $(BIN)/python
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	touch $@

$(VENV)/.worker: pyproject.toml $(VENV)/.torch
	$(PIP) --editable '.[worker]'
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.worker

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache mutants
