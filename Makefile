# Two commands: `make serve` puts the book on your screen, `make test` checks all of it.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
# PYTHON, or else the first of these, that is Python 3.11 to 3.13 and can make virtual environments.
PYTHONS := $(or $(PYTHON),python3.12 python3.13 python3.11 python3 python)

.DEFAULT_GOAL := help
.PHONY: help serve test test-peers bench book lab mutants picture clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: book ## build the book and serve it on http://localhost:8000 or the next free port
	@$(BIN)/python scripts/serve.py --port $(PORT)

test: $(VENV)/tests.stamp ## run every test, the browser's included
	@$(BIN)/python -m pytest

test-peers: $(VENV)/tests.stamp $(VENV)/peers.stamp ## compare kvlib with ONNX, onnxruntime, JAX, transformers and torch
	@$(BIN)/python -m pytest tests/peers tests/test_benchmarks.py

bench: $(VENV)/peers.stamp ## measure kvlib against its peers, about a quarter of an hour on 2 idle cores
	@$(BIN)/python benchmarks/batched_step.py
	@$(BIN)/python benchmarks/small_caches.py
	@$(BIN)/python benchmarks/real_model.py

book: $(VENV)/book.stamp ## build the book into _build/html
	@$(BIN)/python scripts/build.py

lab: $(VENV)/book.stamp ## open the pages as notebooks in JupyterLab
	@$(BIN)/jupytext-config --settings-file $(VENV)/etc/jupyter/labconfig/default_setting_overrides.json \
		set-default-viewer markdown myst
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) book

mutants: $(VENV)/tests.stamp ## plant small faults in kvlib and see the tests catch each
	@$(BIN)/python tests/mutants.py

picture: book $(VENV)/tests.stamp ## take the README's picture from the built book
	@$(BIN)/python scripts/picture.py

clean: ## remove what was built and installed
	rm -rf _build $(VENV)

$(VENV)/book.stamp: requirements.txt pyproject.toml scripts/install.py | $(BIN)/pip
	@echo "Installing what the book is built with into $(VENV) ..."
	@$(BIN)/python scripts/install.py
	@touch $@

$(VENV)/tests.stamp: requirements-test.txt $(VENV)/book.stamp
	@echo "Installing what the tests need into $(VENV) ..."
	@$(BIN)/python scripts/install.py --tests
	@touch $@

$(VENV)/peers.stamp: requirements-peers.txt $(VENV)/book.stamp
	@echo "Installing what kvlib is compared with into $(VENV) ..."
	@$(BIN)/python scripts/install.py --peers
	@touch $@

$(BIN)/pip:
	@for python in $(PYTHONS); do \
		"$$python" scripts/can_host.py >/dev/null 2>&1 && exec "$$python" -m venv $(VENV); \
	done; \
	echo "No usable Python found: Python 3.11, 3.12 or 3.13 is needed, with its venv module" \
		"(on Debian and Ubuntu: apt-get install python3-venv)." >&2; \
	exit 1
