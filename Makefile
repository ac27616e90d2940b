# Everything runs in .venv, which each target sets up from constraints.txt when that is newer.
# Needs Python 3.11 or later (PYTHON=python3.12 chooses another) and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_DIR ?= demo

# ONNX Runtime's package with CUDA, where there is an NVIDIA GPU; else the one for CPUs, a tenth of it.
ORT := $(if $(shell command -v nvidia-smi),gpu,cpu)
OTHER := $(if $(filter gpu,$(ORT)),onnxruntime,onnxruntime-gpu)

.DEFAULT_GOAL := test
.PHONY: demo demo-mumoe web test test-all test-core lint conformance pairs docs bench fuzz mutants soak siege compat \
	gpu-check clean

# The TensorRT-RTX wheel exists for some platforms only; without it its tests are skipped.
$(VENV)/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	# In one environment the two packages overwrite one another.
	! $(BIN)/pip show --quiet $(OTHER) 2>/dev/null || $(BIN)/pip uninstall --quiet --yes onnxruntime onnxruntime-gpu
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,$(ORT)]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[rtx]' \
		|| echo 'no TensorRT-RTX wheel for this platform: engine builds are skipped'
	mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/moexport
	touch $@

demo: $(VENV)/ready
	$(BIN)/moexport demo -o $(DEMO_DIR) --force

demo-mumoe: $(VENV)/ready
	$(BIN)/moexport demo --family mumoe -o $(DEMO_DIR)-mumoe --force

# What examples/web runs with, from the npm registry; without npm its tests are skipped.
WEB := examples/web/node_modules/.package-lock.json

$(WEB): examples/web/package-lock.json
	command -v npm >/dev/null && npm ci --silent --ignore-scripts --prefix examples/web \
		|| echo 'onnxruntime-web and onnxruntime-node are not installed: examples/web is not tested'

web: $(WEB)

# A process per core: most of a test's time is one program on one core.
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

test: $(VENV)/ready $(WEB)
	$(PYTEST) -m 'not slow'

# With the long ones: kills, fuzzing, whole documents, servers, browsers and clusters.
test-all: $(VENV)/ready $(WEB)
	$(PYTEST)
	$(BIN)/python tests/core_alone.py

# The core's own tests, on a copy without plugins.
test-core: $(VENV)/ready
	$(BIN)/python tests/core_alone.py

# The server under hostile clients for two minutes, on a quiet machine: how long honest ones wait, too.
siege: $(VENV)/ready
	MOEXPORT_ALONE=1 $(BIN)/python -m pytest -q -n0 -s tests/exporter/text/test_siege.py -k honest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# The root is the package; mypy finds it under its own name through this link.
	MYPYPATH=$(VENV)/src $(BIN)/mypy -p moexport
	# What Windows does not have is used behind a check of sys.platform alone.
	MYPYPATH=$(VENV)/src $(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 \
		--no-warn-unreachable --exclude /tests/ -p moexport

# Every architecture with token-routed experts that docs/token-routed.md lists, two models of each.
conformance: $(VENV)/ready
	$(PYTEST) tests/exporter/token_routed/all_architectures.py

# Every pair of options once, and what came of it; `make test` runs some of them, others each day.
pairs: $(VENV)/ready
	$(BIN)/python -m moexport.tests.pairs

# The pages as a site that needs no network to be read: site/index.html.
docs: $(VENV)/ready
	$(BIN)/mkdocs build --quiet --strict

# Measures everything and puts the results into the documents: an hour or more, on a quiet machine.
bench: $(VENV)/ready
	$(BIN)/python -m perf
	$(BIN)/python docs/refresh.py performance

# Damaged files of each kind for so many seconds, at low priority; `make test` reads a few hundred.
# FUZZ_KINDS='feeds tables' reads those alone.
FUZZ_SECONDS ?= 600
FUZZ_KINDS ?=

fuzz: $(VENV)/ready
	nice $(BIN)/python -m moexport.tests.fuzzing $(FUZZ_KINDS) --seconds $(FUZZ_SECONDS)

# A service for so many seconds at 80% of the rate that keeps its bound: memory, errors, p99, overload.
SOAK_SECONDS ?= 3600

soak: $(VENV)/ready
	$(BIN)/python -m moexport.tests.soak --seconds $(SOAK_SECONDS)

# Graphs that are damaged and still run, and which of them the checks refuse. MUTANTS='--only mixtral
# --precision int8' makes those alone.
MUTANTS ?=

mutants: $(VENV)/ready
	$(BIN)/python -m moexport.tests.mutants $(MUTANTS)

# Chosen tests with other versions of Python and of what moexport needs, an environment for each by uv
# (6 GB at a time), and the table of docs/install.md. COMPAT=--small: with the pinned PyTorch alone.
COMPAT ?=

compat: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check 'uv>=0.9'
	failed=0; \
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m moexport.tests.compat $(COMPAT) || failed=1; \
	$(BIN)/python docs/refresh.py compat; \
	exit $$failed

# On a machine with an NVIDIA GPU: engines built, compared and timed, and the tests that need one, in
# 45 minutes together; results in gpu-check.json. TensorRT for servers is on NVIDIA's own index.
# GPU_CHECK='--precision fp16 --minutes 10' checks less; the same command goes on where it stopped.
GPU_CHECK ?=

gpu-check: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check \
		--extra-index-url https://pypi.nvidia.com -e '.[tensorrt]'
	$(BIN)/python -m perf.gpu_check -o gpu-check.json $(GPU_CHECK)

clean:
	rm -rf $(VENV) build dist site gpu-check.engines *.egg-info examples/web/node_modules
