# Two commands: `make demo` shows the main job, `make test` runs every check and test.
# Both need Python 3.11 or newer and pip, and set up what they need in .venv; a second run installs nothing.

TORCH := 2.13.0
VENV ?= .venv
# Options for installing torch, where PyTorch's own instructions ask for some; see the README.
TORCH_OPTIONS ?=
# Processes that share the tests: one for each core and one more, since some tests wait, and up to six. Each has servers
# of its own and imports PyTorch, Lightning and the like: on two cores three take 14 minutes, and five take 16.
WORKERS ?= $(shell wanted=$$(($$(getconf _NPROCESSORS_ONLN) + 1)); echo $$((wanted < 6 ? wanted : 6)))
# Options for `frostline demo`, such as --data DIR.
DEMO ?=

BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
UV_VERSION := 0.13.8
COSMIC_RAY_VERSION := 8.7.0

# Tests start some hundred processes, which would each compile Frostline and TensorFlow anew.
unexport PYTHONDONTWRITEBYTECODE
# Threads of PyTorch that wait for each other would spin, on cores that other tests run on: of an example that takes 8 s
# of processor time it made 20. Frostline's own processes have it so too (engines/machine.py).
export OMP_WAIT_POLICY := PASSIVE
# So would those of NumPy: of a regression that takes 0.05 s of one core they made 10.
export OPENBLAS_NUM_THREADS := 1

.PHONY: demo test test-fast test-long check static types layers site fuzz mutation browser cassandra frameworks deploy-tools \
	install install-test docs map lock sbom wheel first-screen lowest clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/frostline demo $(DEMO)

# What is fetched comes at the same time: most of it is waiting and unpacking.
test:
	@$(MAKE) --no-print-directory --jobs install-test browser cassandra frameworks deploy-tools
	@$(MAKE) --no-print-directory check

browser cassandra:
	@scripts/$@.sh

frameworks: $(STAMPS)/venv
	@PYTHON=$(BIN)/python scripts/frameworks.sh

deploy-tools: $(STAMPS)/venv
	@PYTHON=$(BIN)/python scripts/deploy_tools.sh

# What `make test` runs once everything is installed, so that no test may skip for want of that (tests/support/skips.py).
# What takes longer than a moment runs beside the tests.
check test-long: export FROSTLINE_TESTS_COMPLETE := 1
check:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@scripts/check.sh $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# The tests of one folder, within a minute if need be without the longest, beside the types and the import contracts:
# `make test-fast FOLDER=node`, or several folders in quotes. What was left out is said.
FOLDER ?=
test-fast:
	@WORKERS=$(WORKERS) $(BIN)/python scripts/test_fast.py $(FOLDER)

static: types layers site

types:
	$(BIN)/mypy

layers:
	$(BIN)/lint-imports --no-cache

site:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What is too long for every change: all of the matrices of which `make check` runs a sample, ten times the examples of
# each property, and graphs and networks at random.
test-long: test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --hypothesis-profile long -m 'long or not long'
	@$(MAKE) --no-print-directory fuzz

# Graphs that strangers could upload, and networks that users could train, made at random, for SECONDS each, and SEEDS
# runs of a whole system in trouble; the tests try a few of them.
SECONDS ?= 600
SEEDS ?= 100000
fuzz: install-test
	$(BIN)/python tests/support/graph_fuzz.py --seconds $(SECONDS)
	$(BIN)/python tests/support/random_training.py --seconds $(SECONDS)
	$(BIN)/python tests/support/whole_system.py --seeds $(SEEDS)

# How many small changes of what decides its tests notice, of SAMPLE tried in each.
SAMPLE ?= 40
mutation: install-test build/mutation/tool
	PYTHONPATH=$(CURDIR)/build/mutation/tool $(BIN)/python scripts/mutation.py --sample $(SAMPLE) \
		--out build/mutation/report.json

install: $(STAMPS)/demo
install-test: $(STAMPS)/test

docs: install-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The picture of the layers, after a package was added or moved.
map:
	$(BIN)/python scripts/module_map.py

# What a deployed node consists of, by its lock: packages, versions, hashes and licences, as CycloneDX.
sbom: install-test
	@mkdir -p dist
	$(BIN)/python scripts/sbom.py node >dist/sbom.json

# The same sources give the same bytes, wherever and whenever.
wheel: $(STAMPS)/venv
	SOURCE_DATE_EPOCH=0 $(BIN)/python -m hatchling build --target wheel

# The wheel in a fresh environment runs what the README shows first; it fetches packages and weights. FIRST_SCREEN may say
# `--site DIR --random-weights`, and nothing is fetched.
first-screen: install
	$(BIN)/python scripts/first_screen.py $(FIRST_SCREEN)

# Add `UPGRADE=--upgrade` for the newest versions of everything.
lock: build/lock/bin/uv
	UV=build/lock/bin/uv scripts/lock.sh $(UPGRADE)

# The demo and the quick tests with the oldest packages that pyproject.toml allows, once a release.
lowest: install-test build/lock/bin/uv
	UV=build/lock/bin/uv scripts/lowest.sh

clean:
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(STAMPS)/venv:
	@python=$$(scripts/python.sh) && echo "Making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# The locked set comes first, so that pip has nothing left to choose for torch; --no-deps, because the lock is complete.
define install
	@echo "Installing requirements/$(1).txt, torch $(TORCH) and Frostline into $(VENV) (once)"
	@$(PIP) install --no-deps --require-hashes -r requirements/$(1).txt
	@$(PIP) install $(TORCH_OPTIONS) torch==$(TORCH)
	@$(PIP) install --no-deps --no-build-isolation --editable .
endef

$(STAMPS)/demo: $(STAMPS)/venv requirements/demo.txt pyproject.toml
	$(call install,demo)
	@touch $@

# The test set holds the demo set at the same versions.
$(STAMPS)/test: $(STAMPS)/venv requirements/test.txt pyproject.toml
	$(call install,test)
	@touch $(STAMPS)/demo $@

build/mutation/tool: $(STAMPS)/venv
	@$(PIP) install --target $@ cosmic-ray==$(COSMIC_RAY_VERSION)

build/lock/bin/uv: $(STAMPS)/venv
	@$(BIN)/python -m venv build/lock
	@build/lock/bin/python -m pip --disable-pip-version-check --quiet install uv==$(UV_VERSION)
	@touch $@
