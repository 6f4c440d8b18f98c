# The one command surface of this project. Every target does its own set-up.
# `make` alone prints the targets.

PYTHON ?= python3
# Passed on: make demo ARGS="--prefill-tp 8 --decode-tp 4", make test ARGS="tests/unit -x"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage check lint format-check layers type meta fix bench docs docs-site clean

help: ## print this list
	@echo "make TARGET [ARGS=...]"
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

setup: $(STAMP) ## make the virtual environment and install everything pinned in constraints.txt

# A virtual environment that was cut short has no pip; one whose Python is gone has no bin/python.
$(BIN)/pip:
	@.ci/ensure-python "$(PYTHON)"
	$(PYTHON) -m venv --clear $(VENV)

$(STAMP): $(BIN)/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

demo: $(STAMP) ## run prefill and decode daemons with workers on this machine, check every byte
	$(BIN)/moriiod demo $(ARGS)

test: $(STAMP) ## run all tests
	$(PY) -m pytest --numprocesses 2 --dist loadgroup $(ARGS)

coverage: $(STAMP) ## run the tests without processes; show what of core and wire they miss
	$(PY) -m pytest --cov --cov-report term-missing $(wildcard tests/unit tests/property tests/scenarios) $(ARGS)

check: format-check lint type layers meta ## everything that reads the source: run it before a commit

format-check: $(STAMP) ## say what `make fix` would reformat
	$(BIN)/ruff format --check .

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

type: $(STAMP) ## mypy --strict
	$(BIN)/mypy

layers: $(STAMP) ## import rules between the packages
	$(BIN)/lint-imports --no-logo

meta: $(STAMP) ## the project's rules about its own files
	$(PY) -m pytest tests/meta

fix: $(STAMP) ## reformat and correct what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## run every script in tests/bench, one after the other
	@set -e; for script in $(sort $(wildcard tests/bench/*.py)); do \
		echo "== $$script"; $(PY) "$$script" $(ARGS); \
	done

docs: $(STAMP) ## write the generated parts of docs/ and configs/ anew
	$(PY) docs/tools/gen_errors.py
	$(PY) docs/tools/gen_protocol.py
	$(BIN)/moriiod config render --update .

docs-site: docs $(DOCS_STAMP) ## build docs/ as a web site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove the virtual environment, caches and build results
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
