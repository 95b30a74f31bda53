# Two commands matter: `make demo` and `make test`. Both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup test lint demo bench

setup: $(STAMP)

# Repeated only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv: some minutes, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: lint
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: setup
	$(BIN)/phalanx demo

bench: setup
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/own_models.py
