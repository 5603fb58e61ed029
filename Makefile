# Everything a fresh machine needs: `make demo` and `make test` create .venv, install torch and the project, and run.
#
#   PYTHON   interpreter that creates .venv (3.11 or 3.12, or 3.10 without fairseq)
#   TORCH    what pip installs when .venv has no torch yet
#   VENV     the environment; `make VENV= ...` installs nothing and uses $(PYTHON) as it is
#   OP, ARGS operator for `make bench` and `make sanitize`, further arguments for these, test and gpu-test

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
EXTRAS := fairseq,test,demo,dev
JOBS ?= 2
ARGS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
TORCH_READY :=
READY :=
else
PY := $(VENV)/bin/python
TORCH_READY := $(VENV)/.torch
READY := $(VENV)/.installed
endif

# Most modules that pip installs are never imported. Python compiles the others, at their first import.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

# Scripts find the launchers and the linters of the environment first. One thread a process: the machine's cores are
# shared by the test workers, and bit-exact comparisons need a fixed order of summation.
export PATH := $(abspath $(dir $(shell command -v $(PY) || echo $(PY)))):$(PATH)
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help torch install demo test soak lint format compile-ahead cuda-check gpu-test sanitize bench benchmark \
    report clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet "$(TORCH)"
	@touch $@

# The constraint keeps pip from replacing the torch that is there by whatever a dependency would like better.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py
	$(PY) -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/constraints.txt
	$(PY) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

torch: $(TORCH_READY)

install: $(READY)  ## create .venv and install the project with its extras

demo: $(READY)  ## train a small translation model on the bundled corpus and translate with it
	bash examples/wmt14/quickstart.sh

test: $(READY)  ## run the tests that need no GPU
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

soak: $(READY)  ## run the long sweeps and kill tests
	$(TEST_ENV) $(PY) -m pytest -m soak --timeout 3600 $(ARGS)

lint: $(READY)  ## check style: ruff and clang-format at the pinned versions
	ruff check .
	ruff format --check .
	@files=$$(git ls-files '*.cu' '*.cuh' '*.h' '*.cpp'); if [ -n "$$files" ]; then clang-format --dry-run -Werror $$files; fi

format: $(READY)  ## rewrite the sources in that style
	ruff check --fix .
	ruff format .
	@files=$$(git ls-files '*.cu' '*.cuh' '*.h' '*.cpp'); if [ -n "$$files" ]; then clang-format -i $$files; fi

# What `make cuda-check` compiles, at the lowest priority: for idle cores, before the tests or beside them.
compile-ahead: $(TORCH_READY)
	nice -n 19 $(PY) -m tests.build.compilation

cuda-check: $(READY)  ## compile every CUDA source with nvcc and look at the result: spills, 16-byte accesses; no GPU
	$(PY) -m tests.build.compilation
	$(TEST_ENV) $(PY) -m pytest -m nvcc tests/build $(ARGS)

gpu-test: $(READY)  ## run the operator and layer tests on a machine with a GPU
	$(PY) -m pytest tests/kernels tests/layers tests/optim $(ARGS)

sanitize: $(READY)  ## run small cases of every kernel, or of OP, under NVIDIA's compute-sanitizer on a GPU
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
	    $(PY) -m tests.kernels.sanitize $(OP) $(ARGS)

bench: $(READY)  ## time operator OP on a GPU: make bench OP=layer_norm
	$(PY) -m tests.kernels.bench $(OP) $(ARGS)

benchmark: $(READY)  ## whole steps and training runs on a GPU against PyTorch and fairseq, then the tables
	$(PY) -m benchmarks.step --quick
	$(PY) -m benchmarks.fairseq_wps --quick
	$(PY) -m benchmarks.report

report: $(READY)  ## write the tables and pictures of README and docs from benchmarks/results
	$(PY) -m benchmarks.report

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info examples/wmt14/work
