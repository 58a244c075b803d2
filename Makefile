# `make help` lists the targets. Every target that needs the environment makes it first.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up-done
# More arguments for the command behind run, demo, pytest and bench: make run ARGS="--port 9000"
ARGS ?=
# Processes that share the tests, a file at a time; 0: all in one, as with a bare pytest.
WORKERS ?= 2

export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup run demo test check format-check lint types imports pytest format \
	gpu-tools gpu-compile oldest-jax clients bench lock clean
.DELETE_ON_ERROR:

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml requirements/lock.txt scripts/set_up scripts/find_python
	@scripts/set_up $(VENV)
	@touch $@

setup: $(STAMP)  ## Make .venv with the pinned packages (the other targets do this by themselves)

run: $(STAMP)  ## Serve the default model at http://127.0.0.1:8000
	@$(BIN)/headrace serve $(ARGS)

demo: $(STAMP)  ## Start a server on a free port, stream one chat, print its timings, stop the server
	@$(BIN)/python -m bench.demo $(ARGS)

test: gpu-tools  ## Set up, with the compilers for GPUs, then everything in check
	@$(MAKE) --no-print-directory check

check: format-check lint types imports pytest  ## Format, lint, types, import contracts, tests

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

# In the order of the collection, which begins with the files that take longest (tests/conftest.py).
pytest: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

format: $(STAMP)  ## Format the code and apply the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The tests that compile for GPUs run wherever this folder exists.
GPU_TOOLS := $(VENV)/gpu-tools

$(GPU_TOOLS): requirements/cuda.txt scripts/set_up_gpu_tools | $(STAMP)
	@scripts/set_up_gpu_tools $(VENV) requirements/cuda.txt

gpu-tools: $(GPU_TOOLS)  ## Install what compiles for NVIDIA GPUs without one (265 MB, 711 on disk)

gpu-compile: $(GPU_TOOLS)  ## Compile every GPU kernel, and whole steps, for GPUs that are not there
	$(BIN)/pytest -m gpu_tools $(ARGS)

# An environment beside the other one; nothing is shared but the downloads.
OLDEST := .venv-oldest-jax
OLDEST_PINS := $(addsuffix ==0.11.2,jax jaxlib jax-cuda13-pjrt jax-cuda13-plugin) \
	nvidia-cuda-nvcc nvidia-nvvm

oldest-jax:  ## Test kernels, models and steps with the oldest JAX that is allowed (0.11.2)
	@scripts/set_up $(OLDEST) requirements/oldest-jax.txt
	@scripts/set_up_gpu_tools $(OLDEST) requirements/oldest-jax.txt
	$(OLDEST)/bin/pytest tests/kernels_pallas tests/jaxengine/models tests/jaxengine/test_model_runner*.py \
		tests/integration/test_golden_model.py $(ARGS)

clients: $(STAMP)  ## Run small clients that others wrote against a server, in environments of their own
	@$(BIN)/python tests/clients_real/run.py --light

bench: $(STAMP)  ## Start a server, measure it at 1, 8, 32 and 64 streams, stop it
	@$(BIN)/python -m bench.local $(ARGS)

COMPILE := uv pip compile --universal --python-version 3.12 --generate-hashes \
	--custom-compile-command "make lock"

lock:  ## Resolve requirements/*.txt again (needs uv); commit the result after make test
	$(COMPILE) pyproject.toml --extra dev -o requirements/lock.txt $(ARGS)
	$(COMPILE) pyproject.toml --extra serve -c requirements/lock.txt -o requirements/serve.txt
	$(COMPILE) pyproject.toml --extra cuda -c requirements/lock.txt -o requirements/cuda.txt
	echo hatchling | $(COMPILE) - -c requirements/lock.txt -o requirements/build.txt
	for pins in requirements/clients/*.in; do $(COMPILE) $$pins -o $${pins%.in}.txt || exit; done
	printf '%s\n' $(OLDEST_PINS) | $(COMPILE) - --no-deps -o requirements/oldest-jax.txt

clean:  ## Remove the environment and every cache of the tools
	rm -rf $(VENV) .venv-clients $(OLDEST) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
