# Every target sets up what it needs: a virtual environment, torch, the package.
VENV    ?= .venv
PYTHON  ?= python3
# Used only where the environment has no torch yet; the package itself accepts torch >= 2.6.
TORCH   ?= torch==2.13.0
# torch's own index of CPU builds: small downloads. Not asked when pip was told where to look
# (PIP_FIND_LINKS, PIP_INDEX_URL or pip's configuration), nor when set empty: TORCH_INDEX=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed

.PHONY: install demo test check bench clean

install: $(STAMP)

$(STAMP): pyproject.toml tools/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/install.sh
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/pipelane demo

test: $(STAMP)
	$(BIN)/python -m pytest tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	mkdir -p bench-results
	$(BIN)/python -m benchmarks.run --json bench-results/bench.json
	$(BIN)/python -m benchmarks.catalogue --json bench-results/catalogue.json
	$(BIN)/python -m benchmarks.balance --json bench-results/balance.json
	$(BIN)/python -m benchmarks.partition --json bench-results/partition.json
	$(BIN)/python -m benchmarks.auto --json bench-results/auto.json
	$(BIN)/python -m benchmarks.planning --json bench-results/planning.json

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
