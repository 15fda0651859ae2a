# Two commands do everything on a machine with Python ≥ 3.11 and nothing else: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODELS := .cache/models

.PHONY: demo test check format lint types test-real bench clean

demo: $(STAMP)
	$(BIN)/outrider demo

test: $(STAMP)
	$(BIN)/pytest -n auto

check: $(STAMP) format-check lint types test

format: $(STAMP)
	$(BIN)/ruff format src tests training benchmarks
	$(BIN)/ruff check --fix src tests training benchmarks

.PHONY: format-check
format-check: $(STAMP)
	$(BIN)/ruff format --check src tests training benchmarks

lint: $(STAMP)
	$(BIN)/ruff check src tests training benchmarks

types: $(STAMP)
	$(BIN)/mypy

# Real checkpoints, assembled beforehand into $(MODELS); see docs/structure.md.
test-real: $(STAMP)
	$(BIN)/pytest -m real

bench: $(STAMP)
	$(BIN)/python benchmarks/loop_overhead.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,gguf,training]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
