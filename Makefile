# Every target below `setup` runs it first; it does nothing while pyproject.toml and constraints.txt are unchanged.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo test test-slow lint bench system bundled clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup  ## a whole swarm on this machine, cheaters included
	$(BIN)/shoal demo $(ARGS)

test: setup
	$(BIN)/pytest $(ARGS)

test-slow: setup
	$(BIN)/pytest -m slow -n 0 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## every figure of the docs; each script prints one JSON object as its last line
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

bundled: setup  ## rebuild the tiny policy inside the package from its recipe
	$(BIN)/python -m shoal.curation.recipe $(ARGS)

PACKAGES := bubblewrap nginx-light postgresql chromium wrk
PROGRAMS := bwrap nginx chromium psql wrk

system:  ## packages of the operating system that some tests use
	@for program in $(PROGRAMS); do command -v $$program >/dev/null || test -x /usr/sbin/$$program || missing=1; done; \
	if [ -n "$$missing" ]; then \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$SUDO apt-get update -q && $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(PACKAGES); \
	fi

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
