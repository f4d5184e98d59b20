# `make train` and `make test` do all the set-up on a machine with python3 (3.11 or newer), make and a C++ compiler.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Without a GPU and with two cores or more: two processes. Elsewhere Accelerate looks for itself.
LAUNCH := $(shell nvidia-smi -L >/dev/null 2>&1 || [ "$$(nproc)" -lt 2 ] || echo --config_file configs/accelerate/cpu2.yaml)

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed, \
	and $(PYTHON) is older: make PYTHON=python3.11")'

.DEFAULT_GOAL := help
.PHONY: help install train test bench lint format

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install; done by the others where needed

train: $(STAMP) ## train the default job; make train ARGS="--lam 1e-5 --seed 3"
	$(BIN)/accelerate launch $(LAUNCH) launch/train.py $(ARGS)

test: $(STAMP) ## run all tests; make test ARGS="-k digits -x"
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: $(STAMP) ## print the tables of step times, the training command, the methods, selection and reports
	$(BIN)/python benchmarks/step.py $(ARGS)
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/selection_memory.py
	$(BIN)/python benchmarks/report.py

lint: $(STAMP) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The stamp is newer than pyproject.toml when all it asks for is installed. An install that was cut short leaves no
# stamp, and the next call goes on with the .venv that is there.
# DS_BUILD_OPS=0: DeepSpeed compiles its operators when they are first used, not now.
# PYTHONUNBUFFERED: pip's lines appear as they come, in a log file too. Its last part, unpacking, is silent for a
# minute or more: the loop says every 20 seconds how far it is.
$(STAMP): pyproject.toml
	@echo "Installing into $(VENV): a fresh install takes some minutes and 6 GB, most of it torch with its CUDA libraries."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(CHECK_PYTHON) && $(PYTHON) -m venv --clear $(VENV); }
	@while sleep 20 >/dev/null; do echo "... $(VENV) holds $$(du -sh $(VENV) | cut -f1)"; done & trap "kill $$!" EXIT; \
	DS_BUILD_OPS=0 PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --progress-bar on --editable '.[dev]'
	@touch $@
