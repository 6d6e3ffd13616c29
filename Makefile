# Each target sets up what it needs by itself: a virtual environment in .venv
# with this project and its dependencies, made once and again when pyproject.toml changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
# All that users can choose to install; the tests try everything.
EXTRAS := simulations,driving,tensorboard,mlflow,export,launchers,search
# An environment of its own: torch_xla goes with one PyTorch.
XLA_VENV  := .venv-xla
XLA_STAMP := $(XLA_VENV)/.installed

.PHONY: demo deploy-demo examples test test-fast test-deep test-device gpu-check test-flower check-readme lint bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         several ways of federated learning compared on the digits data set"
	@echo "make deploy-demo  GEMS on a real SuperLink with TLS and three authenticated SuperNodes"
	@echo "make test         linters, types and the test suite, in minutes"
	@echo "make test-fast    the tests that take seconds"
	@echo "make test-deep    what takes longer: killed processes, real deployments, Ray, MNIST, 20,000 fuzz cases"
	@echo "make test-device  every computation on a second device (torch_xla on the processor), against the CPU"
	@echo "make gpu-check    the same on a GPU: DEVICE=cuda (cuda:1, mps, xpu, cpu)"
	@echo "make test-flower  every release of Flower that the project admits: can it be installed, and what the tests say"
	@echo "make examples     every example app under flwr run: lines changed, accuracy, bytes, tracebacks"
	@echo "make check-readme the README's ways to install, each in an empty environment"
	@echo "make bench        what messages, spaces, memory and the rest cost, as ratios: a table, also in build/bench.md"
	@echo "make docs         the documentation site in build/site, every link checked"
	@echo "make clean        remove the environment and everything that runs wrote"

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gems-flwr needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(VENV) (once; a few minutes, most of it PyTorch) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]' --group test
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m simulations.reproduce demo --output runs

deploy-demo: $(STAMP)
	@$(BIN)/python -m simulations.deployment

examples: export OMP_NUM_THREADS = 1
examples: $(STAMP)
	@PYTHONPATH=.:tests/helpers $(BIN)/python tests/helpers/measure_examples.py

# What `make test` cannot do: it takes a package index.
check-readme:
	@$(PYTHON) tests/helpers/check_installation.py

# One thread for each worker: libraries that take all cores would wait for each other.
test test-deep: export OMP_NUM_THREADS = 1
test: $(STAMP) lint
	@$(BIN)/python -m pytest -m "not deep" -n auto --dist loadgroup --durations=12 --cov --cov-report=term --cov-fail-under=93

test-fast: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow and not deep"

test-deep: $(STAMP)
	@$(BIN)/python -m pytest -m deep -n auto --dist loadgroup --durations=12

$(XLA_STAMP): pyproject.toml
	@echo "Installing into $(XLA_VENV) (once; some minutes, most of it PyTorch) ..."
	@test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	@$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0 'pytest>=8' 'hypothesis>=6.100' \
	  'flwr[simulation]==1.41.0' --editable '.[simulations]'
	@touch $@

test-device: export PJRT_DEVICE = CPU
test-device: export GEMS_FLWR_TEST_DEVICE = xla
test-device: $(XLA_STAMP)
	@$(XLA_VENV)/bin/python -m pytest tests/device -v --durations=12

DEVICE ?= cuda
gpu-check: export GEMS_FLWR_TEST_DEVICE = $(DEVICE)
gpu-check: $(STAMP)
	@$(BIN)/python -m pytest tests/device -v --durations=12

test-flower: $(STAMP)
	@$(BIN)/python tests/helpers/flower_versions.py

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m simulations.bench

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group docs
	@touch $@

# Strict: a dead link, a missing anchor or a page outside the navigation fails it (not with --quiet).
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS_STAMP)
	@$(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) $(XLA_VENV) runs build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
