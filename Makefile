# make run   the demo: trains a small language model on CPU (or the GPU, if jax has one) and checks it
# make test  every test that needs no GPU
# make check lint, types and the documentation's site
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
JOBS ?= 2
GPU_JOBS ?= $(shell nproc)
TRITONS ?= 3.6 3.7 3.8 3.9

.PHONY: run test check lint docs package bench test-triton test-newest test-tpu-compile test-gpu bench-gpu clean

run: $(VENV)/run.stamp
	$(PY) examples/language_model

check: $(VENV)/test.stamp
	$(MAKE) -j 2 lint docs

# Much of the time would go into compiling for speed, on CPUs, what runs once: XLA's newer code for fusions, the work of
# many threads where there are few, LLVM's longer passes. (Versions of JAX without such a flag refuse it.) And into
# threads that wait for each other, as there are processes enough. All of these share what Python compiles, whatever the
# environment says of that.
QUICKLY = --xla_cpu_parallel_codegen_split_count=1 --xla_llvm_disable_expensive_passes=true
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 JAX_PLATFORMS=cpu XLA_FLAGS="$(QUICKLY)" $(PY) -m pytest \
	-n $(JOBS) --dist worksteal
test: QUICKLY += --xla_cpu_use_fusion_emitters=false
test: $(VENV)/test.stamp
	$(PYTEST)

# The newest releases of all, also of what pyproject.toml does not allow yet, in an environment of their own.
test-newest: VENV = .venv-newest
test-newest:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --upgrade $$($(PYTHON) -m tests.newest)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --upgrade jax-cuda13-plugin
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --editable .
	$(PYTEST)

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/autopep8 --diff --exit-code keraunos tests benchmarks examples
	$(VENV)/bin/mypy

# The site of the documentation, into build/site; what would only be warned of fails. Nothing is fetched.
docs: $(VENV)/test.stamp
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# Speed and memory on this machine's CPU; writes benchmarks/results/cpu.json.
bench: $(VENV)/run.stamp
	JAX_PLATFORMS=cpu $(PY) benchmarks/cpu.py

# The platform cuda with each version of Triton that it knows, in a folder of up to 1 GB for each: the
# emulator on that version's Gluon, and a table of all builds for Hopper. No GPU runs them. All versions are seen through
# before the end says whether one failed. Triton 3.9 warns of a default that is to change, unless it is set.
test-triton: $(TRITONS:%=build/triton-%)
	failed=; for version in $(TRITONS); do \
		export PYTHONPATH=build/triton-$$version JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 TRITON_DEFAULT_FP_FUSION=1; \
		$(PY) -m pytest $(addprefix tests/cuda/test_,emulator.py linear_attention.py prefill.py delta_rule.py) \
			-k "not test_kernels_stay_within_their_budgets" || failed="$$failed $$version"; \
		$(PY) -m tests.cuda.builds || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

.PRECIOUS: build/triton-%
build/triton-%: | $(VENV)/test.stamp
	rm -rf $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part 'triton==$*.*'
	mv $@.part $@

# The kernels for TPUs with the compiler that the installed JAX has for these, in a folder of 700 MB of its own; and a
# table of what it made of them. No TPU runs them.
test-tpu-compile: export PYTHONPATH = build/libtpu
test-tpu-compile: export JAX_PLATFORMS = cpu
test-tpu-compile: export TPU_SKIP_MDS_QUERY = 1
test-tpu-compile: build/libtpu
	$(PY) -m pytest tests/pallas/test_compile.py
	$(PY) -m tests.pallas.compile

build/libtpu: | $(VENV)/test.stamp
	rm -rf $@.part
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part "$$($(PY) -c \
		'from importlib.metadata import requires; print(*(x.split(";")[0] for x in requires("jax") if x.startswith("libtpu")))')"
	mv $@.part $@

# On a machine with a GPU, with its own python3: speed and memory there, against fla-core if it is installed; writes
# benchmarks/results/<gpu>.json.
bench-gpu:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/gpu.py

# On a machine with a GPU, with its own python3: jax, torch, triton, pytest and hypothesis must be there. What plugins
# and warnings its versions bring is no failure of ours. XLA would compile and time many forms of each product, with as
# many threads in each process as there are processors. A test that takes five minutes says where it is.
test-gpu:
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 XLA_FLAGS="$$XLA_FLAGS --xla_gpu_autotune_level=0 \
		--xla_gpu_force_compilation_parallelism=1" PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m pytest tests/linear_attention tests/gated_delta_rule tests/softmax_attention tests/triton tests/cuda tests/serving tests/compat tests/layers tests/types tests/modules/test_lengths.py tests/distributed/test_gpu.py tests/test_contract.py --gpu -p no:benchmark -W default -o faulthandler_timeout=300 -n $(GPU_JOBS) --dist worksteal

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/test.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	@# Without bytecode: Python makes that of the modules that are used, once.
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# Lowers for CUDA without a GPU. Its own requirements are gigabytes; where there is none, those tests are skipped.
	-$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --no-deps jax-cuda13-plugin
	touch $@

# Build the distributions into dist/, check them, and install the wheel into empty environments: without an extra, then
# with each. PyTorch's is gigabytes on Linux: EXTRAS="'' jax cli" leaves it out.
EXTRAS ?= '' cli jax flax torch
package: $(VENV)/bin/python
	rm -rf dist
	$(PY) -m pip install --quiet --disable-pip-version-check build twine
	$(PY) -m tests.package dist --extras $(EXTRAS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
