# SPDX-License-Identifier: Apache-2.0
#
# Everything is set up on first use, in .venv: dependencies, then the build.
# Variables: PYTHON (3.11), TORCH (what pip installs as torch), REPAGE_CUDA (AUTO, ON, OFF).

PYTHON ?= python3.11
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
export REPAGE_WERROR ?= ON

# vLLM's CUDA package, of which the tests read and run the parts that need no GPU.
VLLM_033 := $(VENV)/vllm-0.33.0
export REPAGE_TEST_VLLM_033 := $(abspath $(VLLM_033))

SOURCES := CMakeLists.txt pyproject.toml $(wildcard csrc/*) $(wildcard repage/*.h)

.PHONY: help setup demo test test-fast fuzz bench bench-gpu bench-engine lint format wheel clean

help:
	@echo "make demo       a real vLLM engine, stock and packed, compared token for token; then served"
	@echo "make test       every test that needs no GPU, on the real engine too (about half an hour)"
	@echo "make test-fast  the tests that start no engine"
	@echo "make fuzz       random geometries, tables and engine traffic for ten minutes"
	@echo "make bench      page tables side by side with what vLLM does (bench-gpu, bench-engine)"
	@echo "make lint       what pre-commit and CI check"
	@echo "make format     rewrite sources the way lint wants them"
	@echo "make wheel      build a wheel into dist/"

$(VENV)/.dependencies: pyproject.toml tests/requirements/engine.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -r tests/requirements/engine.txt
	$(BIN)/pip install --quiet --no-deps -r tests/requirements/engine-no-deps.txt
	$(BIN)/pip install --quiet --group build --group test --group lint
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VLLM_033) "vllm==0.33.0"
	touch $@

$(VENV)/.build: $(VENV)/.dependencies $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

setup: $(VENV)/.build

demo: setup
	$(BIN)/python -m repage.demo $(DEMO_ARGS)

test: setup
	$(BIN)/pytest $(PYTEST_ARGS)

test-fast: setup
	$(BIN)/pytest -m "not engine" $(PYTEST_ARGS)

fuzz: setup
	cd tests && python -m fuzz $(FUZZ_ARGS)

bench: setup
	$(BIN)/pip install --quiet "matplotlib>=3.8"
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/page_tables.py --device cpu --out build/bench/cpu.json --plot build/bench/cpu.png

bench-gpu: setup
	$(BIN)/pip install --quiet "matplotlib>=3.8"
	$(BIN)/python benchmarks/page_tables.py --device cuda --out build/bench/cuda.json --plot build/bench/cuda.png --trace build/bench/cuda-trace.json

bench-engine: setup
	$(BIN)/python benchmarks/engine_steps.py --out build/bench/engine.json

lint: setup
	$(BIN)/pre-commit run --all-files

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files "*.h" "*.cc" "*.cu" "*.cuh")

wheel: setup
	$(BIN)/pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist .venv .cache
