# Everything a person does here. Only Python 3.10 or newer is needed beforehand.
.DEFAULT_GOAL := help
.SUFFIXES:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
THREADS ?= 2

.PHONY: help venv serve test check format bench demo-model clean

help:
	@echo "make serve       install on first use, then serve the demo model on http://127.0.0.1:8000"
	@echo "make test        install on first use, then every test"
	@echo "make check       lint, format, types and docstrings"
	@echo "make venv        only install"
	@echo "make demo-model  train the demo model again (hours on a CPU)"
	@echo "make clean       remove the virtual environment and caches"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[serve,train,dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -c constraints.txt kornia kornia_rs
	touch $(STAMP)

serve: $(STAMP)
	$(BIN)/moonvit serve

test: $(STAMP)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/interrogate -q src

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo-model: $(STAMP)
	$(BIN)/python -m train.run --folder runs/demo --threads $(THREADS)
	$(BIN)/python -m train.export --folder runs/demo
	$(BIN)/python -m train.evaluate

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
