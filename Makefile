# HorizonML. `make` or `make help` lists what there is.
# Variables can be overridden: make demo WORKERS=3; make test PYTHON=python3.12; make demo TORCH_INDEX=https://...

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 5
# Where CPU builds of torch come from, and which (see scripts/setup.py).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_VERSION ?= 2.13.0
TORCHVISION_VERSION ?= 0.28.0
export TORCH_INDEX TORCH_VERSION TORCHVISION_VERSION ALLOW_CUDA

BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test unit lint format bench clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@ / {printf "\n\033[1m%s\033[0m\n", substr($$0, 5)} \
		/^[a-zA-Z_-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Start here
setup: ## Create .venv and install everything (the targets below do it when needed)
	@$(PYTHON) scripts/setup.py $(VENV)

demo: setup ## Train by four strategies with 5 local ranks, compare them, draw pictures
	@$(BIN)/horizonml bench compare jobs/digits.yaml --workers $(WORKERS) --out runs/demo

test: setup ## Run all tests on this machine, those with real ranks included
	@$(BIN)/python -m pytest

##@ Develop
unit: setup ## Run the fast tests, without ranks
	@$(BIN)/python -m pytest tests/unit

lint: setup ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## Put the code into the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

##@ Measure
bench: setup ## Compare the engine with torch's own (see benchmarks/README.md; about 10 minutes)
	@$(BIN)/python -m benchmarks.ddp
	@$(BIN)/python -m benchmarks.pipeline
	@$(BIN)/python -m benchmarks.bubble
	@$(BIN)/python -m benchmarks.footprint

##@ Tidy up
clean: ## Delete the environment and all caches (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
