# `make demo` and `make test` set up all they need in .venv; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make gpu TORCH_CUDA=cu130` takes torch from PyTorch's own index for that CUDA, not from PyPI.
TORCH_CUDA ?=
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench soak gpu train record clean
demo: $(VENV)/base.stamp ## run the main job on the bundled trace and show the result
	$(BIN)/greenroom sweep +experiment=demo sweep.overwrite=true

test: $(VENV)/dev.stamp ## the whole suite, on CPU
	$(BIN)/python -m pytest -n auto --dist loadgroup

lint: $(VENV)/dev.stamp ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev.stamp ## speed as ratios against a baseline of the same run
	$(BIN)/python -m pytest tests/bench -m bench -s

soak: $(VENV)/dev.stamp ## a sweep for half an hour: its memory must stay flat
	$(BIN)/python tests/bench/soak.py --minutes 30 --out outputs/soak

gpu: $(VENV)/gpu$(TORCH_CUDA).stamp ## with a CUDA device: measure, validate and test on it (docs/cuda.md)
	$(BIN)/greenroom validate --device cuda --measure --minutes 8 --out docs/validation/cuda; status=$$?; \
		$(BIN)/python -m pytest -m cuda && exit $$status

train: $(VENV)/dev.stamp ## train the bundled model anew (about an hour on two cores)
	$(BIN)/python -m traces.tiny.train

record: $(VENV)/dev.stamp ## record the bundled traces anew from the bundled model
	$(BIN)/greenroom record --model tiny --out traces/tiny/trace.parquet \
		--requests 96 --batch-size 16 --seed 2026 --gates-ahead 3 --licence Apache-2.0
	$(BIN)/greenroom record --model tiny --out traces/tiny/logits.parquet \
		--requests 10 --batch-size 10 --seed 2027 --gates-ahead 3 --logits --licence Apache-2.0

clean: ## remove the environment and all outputs
	rm -rf $(VENV) outputs multirun build dist *.egg-info

$(VENV)/base.stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Greenroom needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(PIP) --editable ".[torch,dev]"
	touch $@

$(VENV)/gpu$(TORCH_CUDA).stamp: $(VENV)/dev.stamp
	$(if $(TORCH_CUDA),$(PIP) --extra-index-url https://download.pytorch.org/whl/$(TORCH_CUDA) "torch==$(TORCH_VERSION)+$(TORCH_CUDA)")
	$(BIN)/python -c 'import sys, real.device; sys.exit(real.device.why_not_cuda())'
	touch $@
