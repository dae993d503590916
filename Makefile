# make run   the demo: trains a small language model on CPU (or the GPU, if jax has one) and checks it
# make test  lint, types and every test that needs no GPU
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
JOBS ?= 2
GPU_JOBS ?= $(shell nproc)

.PHONY: run test lint bench test-gpu bench-gpu clean

run: $(VENV)/run.stamp
	$(PY) -m keraunos demo

# Much of the time would go into XLA's newer code for fusions, on CPUs, of programs that run once. (Versions of JAX that
# have no other refuse the flag.) All processes share what Python compiles, whatever the environment says of that.
test: $(VENV)/test.stamp lint
	PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_use_fusion_emitters=false \
		$(PY) -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Speed and memory on this machine's CPU; writes benchmarks/results/cpu.json.
bench: $(VENV)/run.stamp
	JAX_PLATFORMS=cpu $(PY) benchmarks/cpu.py

# On a machine with a GPU, with its own python3: speed and memory there, against fla-core if it is installed; writes
# benchmarks/results/<gpu>.json.
bench-gpu:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/gpu.py

# On a machine with a GPU, with its own python3: jax, torch, triton, pytest and hypothesis must be there. What plugins
# and warnings its versions bring is no failure of ours.
test-gpu:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m pytest tests/linear_attention tests/softmax_attention tests/triton tests/pallas tests/serving tests/distributed/test_gpu.py tests/test_contract.py --gpu -p no:benchmark -W default -n $(GPU_JOBS) --dist worksteal

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/test.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# Lowers for CUDA without a GPU. Its own requirements are gigabytes; where there is none, those tests are skipped.
	-$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps jax-cuda13-plugin
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
