# make demo   install what is needed, then run the main job on a real model; STORE=lmcache: over LMCache
# make test   install what is needed, then lint, types and all tests
# make bench  agents on real vLLM, the simulator, micro benchmarks (bench-quick: less of each)
# make soak   half an hour of everything going wrong at once
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements/cpu-dev.lock
# Extra arguments for pytest, as in: make test PYTEST_ARGS="-m 'not e2e'"
PYTEST_ARGS ?=
# Tests side by side, each worker on a core of its own: 6 GiB of memory a worker
WORKERS ?= 2
# Where the demo keeps KV: redis or lmcache
STORE ?= redis
# Where results of `make bench` go
RESULTS ?= bench-results

.DEFAULT_GOAL := test
.PHONY: demo known-store test lint format bench bench-quick soak install system clean broken-builds

demo: known-store install
	$(BIN)/spm demo --store $(STORE)

# Before minutes of installing.
known-store:
	@case "$(STORE)" in redis|lmcache) ;; \
		*) echo "error: STORE=$(STORE): choose redis or lmcache" >&2; exit 2 ;; esac

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every table of docs/benchmarks.md, with JSON and pictures in $(RESULTS). `-`: one that misses
# a bound says so, and the next one runs all the same.
bench bench-quick: install
	@mkdir -p $(RESULTS)
	-$(BIN)/python benchmarks/agents_e2e.py $(QUICK) --json $(RESULTS)/agents_e2e.json
	-$(BIN)/python benchmarks/sim/check.py $(RESULTS)/agents_e2e.json --json $(RESULTS)/sim_check.json
	-$(BIN)/python benchmarks/sim/run.py $(QUICK) --json $(RESULTS)/sim.json
	-$(BIN)/python benchmarks/micro/run.py $(QUICK) --json $(RESULTS)/micro.json

bench-quick: QUICK = --quick

# Half an hour of agents while Redis fails in every way; says whether it was survived.
soak: install
	$(BIN)/python benchmarks/soak.py --minutes 30 --seed 0

# Does each test see what it is there for? Half an hour. ROWS="F5 F22": only these
broken-builds: install
	$(BIN)/python -m tests.broken_builds $(ROWS)

install: system $(VENV)/.project-stamp

system:
	@scripts/system-packages.sh $(PYTHON)

# `import torch, vllm` catches a wrong torch build here rather than in the first test.
$(VENV)/.lock-stamp: $(LOCK) | system
	@echo "Installing $(LOCK) into $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --no-deps -r $(LOCK)
	@$(BIN)/python -c "import torch, vllm" 2>/dev/null || \
		{ echo "error: vLLM does not import; is torch a CPU build? See $(LOCK)" >&2; exit 1; }
	@touch $@

$(VENV)/.project-stamp: pyproject.toml $(VENV)/.lock-stamp
	@$(BIN)/pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
