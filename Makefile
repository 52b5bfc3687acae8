# kvq on one machine: `make run` shows it, `make test` checks it.
# Needs make and Python 3.11 or newer; everything else goes into .venv and .demo.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.kvq-installed
LOCK := requirements-dev.lock

DEMO := .demo
MODEL := $(DEMO)/gemma-3-270m
STORE := $(DEMO)/store
RESULTS := $(DEMO)/results.jsonl
PROMPTS := producer/examples/prompts.jsonl

# On Linux, MLX's CPU build comes with a slow BLAS; Debian's OpenBLAS is many times faster in float32.
ifeq ($(shell uname -s),Linux)
OPENBLAS := $(firstword $(wildcard /usr/lib/$(shell uname -m)-linux-gnu/openblas-pthread/libopenblas.so.0))
# OpenBLAS takes a processor that is newer than itself for one of 2004.
KERNELS := $(shell awk '/^flags/ { print / avx512dq .* avx512vl/ ? "SkylakeX" : / avx2 / ? "Haswell" : ""; exit }' /proc/cpuinfo)
BLAS_HINT := $(if $(OPENBLAS),,no OpenBLAS found: MLX will be slow here; get it with: apt-get install libopenblas0-pthread)
endif
FAST := env $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS) $(KERNELS:%=OPENBLAS_CORETYPE=%))
# The demo asks no model hub for anything.
KVQ := $(FAST) HF_HUB_OFFLINE=1 $(BIN)/kvq
PYTEST := $(FAST) KVQ_DEMO_MODEL=$(CURDIR)/$(MODEL) $(BIN)/python -m pytest

.PHONY: help run test lint docs demo-model lock clean clean-all blas $(VENV)

help: ## show this help
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done

run: $(INSTALLED) demo-model blas ## prefill the example prompts, then resume one of them
	@$(KVQ) run $(PROMPTS) --model $(MODEL) --store $(STORE) --output $(RESULTS)
	@echo
	@echo "resuming the last prompt, with a few words more:"
	@tail -n 1 $(PROMPTS) \
	  | $(BIN)/python -c 'import json, sys; print(json.load(sys.stdin)["prompt"], "The first boat", end="")' \
	  | $(KVQ) generate --store $(STORE) --model $(MODEL) --stdin --compare-cold --max-tokens 10

test: lint demo-model blas ## lint, type check, and all tests
	@$(PYTEST) -n auto tests/unit
	@$(PYTEST) tests/integration
	@$(PYTEST) tests/acceptance

lint: $(INSTALLED) ## ruff and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "run: $(BIN)/ruff format"; exit 1; }
	@$(BIN)/mypy

docs: $(INSTALLED) ## rewrite what the documents take from the code
	@$(BIN)/python tests/documents.py

demo-model: $(INSTALLED) ## make the small real model in .demo, once
	@$(BIN)/python -m kvq_producer.demo $(MODEL)

lock: $(INSTALLED) ## pin the newest versions of all that development needs
	@$(PIP) uv
	@$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.11 \
	  --extra local --extra demo --extra metrics --group dev \
	  --custom-compile-command 'make lock' --output-file $(LOCK) pyproject.toml

clean: ## remove caches, and the store that `make run` filled
	@rm -rf $(STORE) $(RESULTS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find shared worker producer tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove the demo model and .venv too
	@rm -rf $(DEMO) $(VENV)

blas:
	@$(if $(BLAS_HINT),echo "$(BLAS_HINT)",:)

# The lock holds the versions that the tests last passed with; a newer Python than it knows may need
# others. pip 25.1 is the first that reads dependency groups.
$(INSTALLED): pyproject.toml $(LOCK)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory $(VENV)
	@echo "installing kvq and what it needs into $(VENV) (once, a minute or two)"
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) --editable '.[local,demo,metrics]' --group dev \
	  $$($(BIN)/python -c 'import sys; print("-c $(LOCK)" if sys.version_info < (3, 14) else "")')
	@touch $@

$(VENV):
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here: install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvq needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12"; \
	  exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
