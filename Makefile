# `make` or `make help` lists the targets. Each makes its own virtual environment in .venv when it needs one.

VENV := .venv
BIN := $(VENV)/bin
# More arguments for `pip install`, for example an index that has builds of torch for the CPU only:
#   make test PIP_ARGS="--extra-index-url https://example.org/cpu"
PIP_ARGS ?=
# The first Python here that is new enough; `make PYTHON=/path/to/python test` chooses another.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# An environment is good for as long as these two files say the same.
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
READY := $(VENV)/ready-$(KEY)
GPU_READY := $(VENV)/ready-gpu-$(KEY)

# Processes that share the test files and notebooks; `make test JOBS=4` on a larger machine.
JOBS ?= 3
SLOW ?= slow
# `make test CPU=avx2` tests as on a CPU with fewer features: sse, avx2, avx512, avx512_bf16 (unset: all that this one has).
CPU ?=
export MINIVLLM_CPU_FEATURES = $(CPU)
# The tests start hundreds of processes: the package is compiled once for them all, even where a container says not to keep it.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadfile
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=300 --nbval-sanitize-with nbs/sanitize.cfg -p no:cacheprovider

.DEFAULT_GOAL := help
.PHONY: help install demo test fast slow load notebooks lab serve site export check format lint types bench gpu clean

help:  ## list the targets
	@awk -F ':.*##' '/^[a-z]+:.*##/ {printf "  make %-9s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## make .venv and install minivllm into it, once

$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo "minivllm needs Python 3.11 or newer, and found none: $$(python3 --version 2>&1)." \
		"Install one, or name it: make PYTHON=/path/to/python ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "minivllm needs Python 3.11 or newer;" \
		"$(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install pip; }

$(READY): $(VENV)/bin/pip
	$(BIN)/pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/ready-* && touch $@

demo: $(READY)  ## answer four prompts with a real model, and show how they were scheduled
	$(BIN)/minivllm demo

test: $(READY)  ## run the fast tests and every notebook, comparing its outputs with the stored ones
	$(PYTEST) -m "not slow and not load" $(NBVAL) tests nbs

fast: $(READY)  ## run the fast tests alone
	$(PYTEST) -m "not slow and not load"

slow: $(READY)  ## run the slow tests alone: long searches, the real model, kernels in the simulator
	$(PYTEST) -m "$(SLOW)"

load: $(READY)  ## send thousands of requests to a server: the OpenAPI document's cases, a queue that overflows
	$(BIN)/pytest -m load

notebooks: $(READY)  ## run every notebook, comparing its outputs with the stored ones
	$(PYTEST) $(NBVAL) nbs

lab: $(READY)  ## open the book in JupyterLab; saving a notebook exports its module
	$(BIN)/jupyter lab --notebook-dir=nbs \
		--FileContentsManager.pre_save_hook=minivllm.literate.pre_save_hook \
		--FileContentsManager.post_save_hook=minivllm.literate.post_save_hook

serve: $(READY)  ## serve the model over the OpenAI API
	$(BIN)/minivllm serve

site: $(READY)  ## build the documentation pages into site/_build/html
	$(BIN)/python site/pages.py site/_pages
	$(BIN)/sphinx-build -b html -W --keep-going -q -j 2 -d site/_build/doctrees -c site site/_pages site/_build/html
	@echo "open site/_build/html/index.html"

export: $(READY)  ## write the modules of the notebooks that changed
	$(BIN)/python -m minivllm.literate export

check: $(READY)  ## check that notebooks and modules agree, and say which cell differs
	$(BIN)/python -m minivllm.literate check

format: $(READY)  ## format notebooks and tests, clean the notebooks, export the modules
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m minivllm.literate clean
	$(BIN)/python -m minivllm.literate export

lint: $(READY)  ## look for mistakes and bad format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## check the types of both packages with mypy
	$(BIN)/mypy

bench: $(READY)  ## run the benchmarks; each prints a table of ratios
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# Extra arguments for compute-sanitizer's runs: the attention kernels, over lengths around the edges of a tile, and the products.
SANITIZE := --kernel-regex kns=decode_mma --kernel-regex kns=prefill_mma --kernel-regex kns=prefill_wgmma --kernel-regex kns=gemv --error-exitcode 1

gpu: $(GPU_READY)  ## on a machine with an NVIDIA GPU: test, sanitize and time the kernels and the engine
	$(BIN)/pytest -m gpu tests/kernels_cuda tests/engine
	@if command -v compute-sanitizer >/dev/null; then for tool in memcheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool $(SANITIZE) \
		$(BIN)/python -m pytest -q tests/kernels_cuda/test_gpu.py -k "lengths_around or view_of or gemv or writes_to_an_fp8" || exit 1; done; \
	else echo "compute-sanitizer is not here (it comes with the CUDA toolkit): not run"; fi
	for name in kernels prefill gemv decode_step engine_gpu lora_gpu start_gpu; do $(BIN)/python benchmarks/$$name.py --output benchmarks/results || exit 1; done

$(GPU_READY): $(READY)
	$(BIN)/pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,cuda]'
	@touch $@

clean:  ## delete the environment, caches and built pages
	rm -rf $(VENV) site/_pages site/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
