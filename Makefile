# Everything runs in .venv, which the first target that needs it makes. PYTHON chooses the
# interpreter it is made from (3.10 to 3.13): make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
STEPS ?= 20
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup run test verify lint format types clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything in it

run: $(READY) ## a quick benchmark, then 20 training steps (STEPS=n for more)
	$(BIN)/pageahead bench --preset quick
	$(BIN)/python examples/train_gpt.py --steps $(STEPS)

test: $(READY) ## the tests, with coverage, in 2 processes (JOBS=n for more)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --cov --cov-report=term

verify: $(READY) ## bitsandbytes against every strategy, bit for bit, on the CPU
	$(BIN)/pageahead verify --device cpu

lint: $(READY) ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY) ## apply ruff's formatting and its safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY) ## mypy --strict
	$(BIN)/mypy

clean: ## remove .venv, caches and build results
	rm -rf $(VENV) build dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples -type d -name __pycache__ -prune -exec rm -rf {} +

# PyTorch first and by its exact version: a build that lies on the machine is then preferred to
# whatever else a package further down the line would ask for.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
