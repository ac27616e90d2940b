# Everything runs in .venv, which each target sets up again when constraints.txt has changed.
# Only Python 3.11 or later is needed (PYTHON=python3.12 selects another version).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_DIR ?= demo

# ONNX Runtime's package with CUDA if there is an NVIDIA GPU, otherwise the one for CPUs, a tenth of its size.
ORT := $(if $(shell command -v nvidia-smi),gpu,cpu)
OTHER := $(if $(filter gpu,$(ORT)),onnxruntime,onnxruntime-gpu)

.DEFAULT_GOAL := test
.PHONY: demo demo-mumoe demo-ready web test test-all test-core lint conformance pairs docs bench fuzz mutants soak siege compat \
	gpu-check clean

# Without an NVIDIA GPU, PyTorch's build for CPUs: other builds bring gigabytes of CUDA libraries. If the
# index of these builds cannot be reached, the build of pip's own index is installed.
TORCH_INDEX ?= $(if $(filter cpu,$(ORT)),https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/pip --disable-pip-version-check
TORCH = $(PIP) install $(1) -c constraints.txt $(2) torch
INSTALL_TORCH = $(if $(TORCH_INDEX),$(call TORCH,$(1),--retries 1 --timeout 15 --index-url $(TORCH_INDEX)) \
	|| )$(call TORCH,$(1))

# The TensorRT-RTX wheel exists for some platforms only; its tests are skipped on the others.
$(VENV)/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call TORCH,--quiet)
	# In one environment, the two packages overwrite each other.
	! $(BIN)/pip show --quiet $(OTHER) 2>/dev/null || $(BIN)/pip uninstall --quiet --yes onnxruntime onnxruntime-gpu
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,$(ORT)]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[rtx]' \
		|| echo 'no TensorRT-RTX wheel for this platform: engine builds are skipped'
	mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/moexport
	touch $@

# Only what the demo needs, with pip's own progress bar; a complete environment is used as it is.
$(VENV)/demo-ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call INSTALL_TORCH)
	! $(BIN)/pip show --quiet $(OTHER) 2>/dev/null || $(BIN)/pip uninstall --quiet --yes onnxruntime onnxruntime-gpu
	$(PIP) install -c constraints.txt -e '.[demo,$(ORT)]'
	touch $@

demo-ready: $(if $(wildcard $(VENV)/ready),$(VENV)/ready,$(VENV)/demo-ready)

demo: demo-ready
	$(BIN)/moexport demo -o $(DEMO_DIR) --force

demo-mumoe: demo-ready
	$(BIN)/moexport demo --family mumoe -o $(DEMO_DIR)-mumoe --force

# What examples/web needs, from the npm registry; without npm, its tests are skipped.
WEB := examples/web/node_modules/.package-lock.json

$(WEB): examples/web/package-lock.json
	command -v npm >/dev/null && npm ci --silent --ignore-scripts --prefix examples/web \
		|| echo 'onnxruntime-web and onnxruntime-node are not installed: examples/web is not tested'

web: $(WEB)

# One process per core: a test spends most of its time in one program on one core.
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

# The core's tests, each with its first case only, and one path through each plugin.
test: $(VENV)/ready
	$(PYTEST) --brief

# Every case, the plugins' own tests, tests/hard (mutants, pairs, fuzzing, kills, sieges, versions), and
# the long tests: whole documents, servers, browsers and clusters.
test-all: $(VENV)/ready $(WEB)
	$(PYTEST)
	$(BIN)/python tests/core_alone.py

# The core's own tests, on a copy without plugins.
test-core: $(VENV)/ready
	$(BIN)/python tests/core_alone.py

# The server under hostile clients for two minutes, on an idle machine, and how long honest clients wait.
siege: $(VENV)/ready
	MOEXPORT_ALONE=1 $(BIN)/python -m pytest -q -n0 -s tests/hard/siege/test_siege.py -k honest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# The root is the package; mypy finds it under the package's name through this link.
	MYPYPATH=$(VENV)/src $(BIN)/mypy -p moexport
	# Anything that Windows lacks must be used only after a check of sys.platform.
	MYPYPATH=$(VENV)/src $(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 \
		--no-warn-unreachable --exclude /tests/ -p moexport

# Every architecture that plugins/token_routed/docs/token-routed.md lists, two models of each.
conformance: $(VENV)/ready
	$(PYTEST) plugins/token_routed/tests/all_architectures.py

# Every pair of options once, with the outcomes; `make test-all` runs some pairs, different ones each day.
pairs: $(VENV)/ready
	$(BIN)/python -m moexport.tests.hard.pairs

# The pages as a site that can be read offline: site/index.html.
docs: $(VENV)/ready
	$(BIN)/mkdocs build --quiet --strict

# Measures everything and puts the results into the documents: an hour or more, on an idle machine.
bench: $(VENV)/ready
	$(BIN)/python -m perf
	$(BIN)/python docs/refresh.py performance

# Reads damaged files of each kind for FUZZ_SECONDS, at low priority; `make test-all` reads a few hundred.
# FUZZ_KINDS='feeds tables' reads only these kinds.
FUZZ_SECONDS ?= 600
FUZZ_KINDS ?=

fuzz: $(VENV)/ready
	nice $(BIN)/python -m moexport.tests.hard.fuzzing $(FUZZ_KINDS) --seconds $(FUZZ_SECONDS)

# A service for SOAK_SECONDS at 80% of the rate that meets its bound: memory, errors, p99, overload.
SOAK_SECONDS ?= 3600

soak: $(VENV)/ready
	$(BIN)/python -m moexport.tests.hard.soak --seconds $(SOAK_SECONDS)

# Damages graphs that still run, and counts those that the checks refuse. MUTANTS='--only mixtral
# --precision int8' limits the graphs.
MUTANTS ?=

mutants: $(VENV)/ready
	$(BIN)/python -m moexport.tests.hard.mutants $(MUTANTS)

# Selected tests with other versions of Python and of the dependencies, each in an environment made by uv
# (6 GB at a time), and the table of docs/evidence/versions.md. COMPAT=--small: only the pinned PyTorch.
COMPAT ?=

compat: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check 'uv>=0.9'
	failed=0; \
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m moexport.tests.hard.compat $(COMPAT) || failed=1; \
	$(BIN)/python docs/refresh.py compat; \
	exit $$failed

# On a machine with an NVIDIA GPU, in ten minutes: graphs in ONNX Runtime compared with PyTorch, engines if
# TensorRT can be installed (from NVIDIA's own index), and the tests that need a GPU. Results are in
# gpu-check.json and gpu-check-rows.json. GPU_CHECK='--minutes 45' checks every precision and lowering
# of engines; the same command continues an interrupted check.
GPU_CHECK ?=

gpu-check: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check \
		--extra-index-url https://pypi.nvidia.com -e '.[tensorrt]' \
		|| echo "TensorRT cannot be installed here: its engines are not checked"
	$(BIN)/python -m perf.gpu_check -o gpu-check.json $(GPU_CHECK)

clean:
	rm -rf $(VENV) build dist site gpu-check.engines *.egg-info examples/web/node_modules
