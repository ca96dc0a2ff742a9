# make demo   trains MAPPO on MPE simple_spread and leaves curves, numbers, a GIF and the parameters in runs/
# make test   style, types and tests
# make lint   style and types only
# make docs   the documentation site, in site/
#
# The first call makes a virtual environment in .venv. Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: demo test lint docs

demo: $(VENV)/.installed-cli
	@$(BIN)/python benchmarks/demo.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy jmarl

# The site runs no code of its pages (tests do that); it asks the code for its tables, on the CPU.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/mkdocs build --strict

# uv installs several times faster than pip, but does not read pip's configuration (mirrors, say): then pip does it.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing jmarl and what it needs into $(VENV), once"
	@{ $(PIP) install uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[$*]'; } \
	  || $(PIP) install --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jmarl needs Python 3.11 or newer and '$(PYTHON)' is not: try make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
