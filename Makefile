# Every target makes the virtual environment that it needs; `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

DEMO_CONFIG = configs/smollm2_demo.py
DEMO_RUN = runs/smollm2_demo

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean
.NOTPARALLEL: # two installs into one environment at a time would disturb each other

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'
	@echo "  variables: PYTHON=$(PYTHON) (3.11 or newer), VENV=$(VENV)"

demo: $(VENV)/.installed ## distil a drafter for SmolLM2-135M on this machine, then measure its speedup
	@resume=; if [ -d $(DEMO_RUN) ]; then resume=--resume; fi; \
	set -x; $(BIN)/python -m train.distill --config $(DEMO_CONFIG) $$resume
	$(BIN)/python -m eval.speedup --config $(DEMO_CONFIG) --drafter $(DEMO_RUN) --num_prompts 6 --repeats 1 --nostages

test: $(VENV)/.installed-dev ## run the tests
	$(BIN)/python -m pytest -n 2 -q

lint: $(VENV)/.installed-dev ## check style (ruff) and types (pyright)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean: ## remove caches, build outputs and the virtual environment; runs/ stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path '*/.venv*' -prune -exec rm -rf {} +
	if [ -f $(VENV)/.created ]; then rm -rf $(VENV); fi

# --- virtual environment: one stamp per step, installed again only when pyproject.toml changes ---

# PyPI's jax runs on the CPU; for an accelerator: $(BIN)/pip install -e '.[gpu]' or '.[tpu]'.
$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dspark_jax needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
