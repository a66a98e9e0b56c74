# Two commands for a newcomer: `make demo` and `make test`. Both set themselves up.
SHELL := /bin/bash
PY := .venv/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
WORKERS ?= 2
# Where an environment forbids it, every one of a thousand processes would compile what it imports anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: gpu-check gpu-node gpu-wheels bench-guard docs mutations demo test test-fast test-pythons test-floor newcomer test-slurm testbed-slurm test-kubernetes testbed-kubernetes verify accuracy strangers lint rooms clean

# It installs the package and torch, unless everything is installed already.
DEMO := $(if $(wildcard .venv/.ready),.venv/.ready,.venv/.demo)
demo: $(DEMO)
	.venv/bin/orch demo
	@cat $<

# Tier by tier, with the seconds of each and the slowest files: docs/testing.md.
test: .venv/.ready lint
	OMP_NUM_THREADS=1 $(PY) -m tests.tiers $(WORKERS)

test-fast: .venv/.ready
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not process and not slurm and not kubernetes and not full"

# Other versions than the pinned ones: quick tests of orchestrator under Python 3.11 to 3.14; all of the trainer with the
# oldest torch that pyproject.toml allows.
test-pythons: .venv/.ready
	$(PY) -m tests.versions pythons --workers $(WORKERS)

test-floor: .venv/.ready
	$(PY) -m tests.versions floor --workers $(WORKERS)

# README and guides line by line, on a Debian with Python, git and make alone; needs root, some minutes and 300 MB.
newcomer: .venv/.ready
	$(PYTEST) -m full -rs tests/install

# The tier alone, with a later Slurm in a root of its own: some minutes and 300 MB the first time.
test-slurm: .venv/.ready
	ORCH_TEST_LATER_SLURM=1 $(PYTEST) -n 3 --dist loadgroup -rs -m slurm tests/slurm

testbed-slurm: .venv/.ready
	@$(PY) -m tests.beds.slurm.cluster start

test-kubernetes: .venv/.ready
	ORCH_TEST_KUBERNETES=1 $(PYTEST) -m kubernetes tests/kubernetes

testbed-kubernetes: .venv/.ready
	@$(PY) -m tests.beds.kubernetes.bed start

# The published parity table, ten to twenty minutes; then mutations and the numbers that users feel.
verify: .venv/.ready
	$(PYTEST) -m full
	.venv/bin/orch verify --matrix full --out docs/parity.md
	$(PY) docs/make_techniques.py
	$(MAKE) mutations COUNT=200
	$(MAKE) bench-guard

# The numbers that users feel, held against benchmarks/results/guard.json; two minutes. It names what got worse and does
# not fail for it: docs/testing.md.
bench-guard: .venv/.ready
	$(PY) -m benchmarks.guard

# Small changes of the source, each judged by the quick tests that run its line: COUNT of the trainer and as many of the
# orchestrator, drawn by SEED, five seconds each; 0: all, a night. An hour before them: which tests run which lines.
COUNT ?= 0
SEED ?= 1
mutations: .venv/.ready
	$(PY) -m tests.mutations.run --record --count $(COUNT) --seed $(SEED) --out docs/mutations.md

# On a machine with a GPU: three steps of every technique beside float64 on the host, a 1B model beside plain torch, and a
# run that is killed twice, cancelled and resumed; at most MINUTES each for the first two. All three run, whatever fails.
# On an image that brings its own torch: make gpu-check PY=python3, with the wheels of make gpu-wheels beside it.
MINUTES ?= 8
GPU = PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu-packages$${PYTHONPATH:+:$$PYTHONPATH} $(PY) -m benchmarks
gpu-check: $(if $(filter .venv/bin/python,$(PY)),.venv/.ready)
	@$(GPU).gpu_wheels --install
	@status=0; \
	$(GPU).gpu_parity --minutes $(MINUTES) || status=1; \
	$(GPU).gpu_single --minutes $(MINUTES) || status=1; \
	$(GPU).gpu_run || status=1; \
	exit $$status

# On a node of GPUs: every technique on all of them, what matters first, and the node's ceilings, for MINUTES; or
# ONLY="'TP + SP' experts", cases as the last line of an earlier call names them; GPUS=4 for some of its GPUs.
gpu-node: $(if $(filter .venv/bin/python,$(PY)),.venv/.ready)
	@$(GPU).gpu_wheels --install
	$(GPU).gpu_node --minutes $(MINUTES)$(if $(GPUS), --gpus $(GPUS))$(if $(ONLY), --only $(ONLY))

# What a machine with a card lacks besides torch and numpy, in build/gpu-wheels, for Linux on x86-64;
# WHEELS_PYTHON=3.12 for an image with another Python than this one, TITAN=1 for torchtitan as well.
gpu-wheels: .venv/.ready
	$(PY) -m benchmarks.gpu_wheels --python "$(WHEELS_PYTHON)" $(if $(TITAN),--titan)

# The score in docs/accuracy.md, by a table of measured runs: some minutes, most of them for the terms.
accuracy: .venv/.ready
	.venv/bin/orch predict --table $(TABLE) --terms --into docs/accuracy.md

# The pages as a site with a search, in build/site; the reference written from the code first.
docs: .venv/.ready
	$(PY) docs/make_reference.py
	$(PY) -m sphinx --fail-on-warning --keep-going -q docs build/site


# The score in docs/strangers.md, of runs that no parameter was fitted to.
strangers: .venv/.ready
	.venv/bin/orch predict --table tests/planner/strangers.csv --into docs/strangers.md

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/vulture

# The rooms of the code, their sizes, and who imports whom.
rooms: .venv/.ready
	@$(PY) -m tests.house.rooms

.venv/.ready: pyproject.toml setup.py .ci/constraints.txt .ci/setup
	.ci/setup

.venv/.demo: pyproject.toml setup.py .ci/constraints.txt .ci/setup
	.ci/setup demo

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
