# One word per chore. Each target sets up what it needs; `make` alone says what there is.

PYTHON ?= python3
PACKAGES := g++ iproute2 nftables prometheus
BIN := .venv/bin
READY := .venv/.ready
# What `make demo` does to the run; `make demo ARGS=--help` lists the choices.
ARGS ?= --fault kill@60 --resume never

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-runs test-slow test-soak check docs bench gpu-tiny packages clean

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small model and break it on the way; ARGS="..." changes the run
	$(BIN)/python examples/quickstart.py $(ARGS)

test: test-unit test-runs  ## the tests, half an hour on two cores

# Files go beside each other: three of those that wait now and then; two where they start runs,
# each with a Ray cluster of its own, which leave no core idle.
test-unit: $(READY)  ## those of them that start no run, eleven minutes
	$(BIN)/pytest -o cache_dir=.pytest_cache/unit -n 3 --dist loadfile $(PYTEST_ARGS) tests/unit

test-runs: $(READY)  ## the others, twenty minutes
	$(BIN)/pytest -o cache_dir=.pytest_cache/runs -n 2 --dist loadfile $(PYTEST_ARGS) --ignore tests/unit

test-slow: $(READY)  ## those that `make test` leaves out for their cost
	$(BIN)/pytest -m slow

test-soak: $(READY)  ## machines that come and go, partitions, every fault point; hours
	$(BIN)/pytest -m soak

check: $(READY)  ## format, lint, types, import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)  ## the manual as a site in build/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

bench: $(READY)  ## every benchmark; each prints one JSON object as its last line
	@set -e; found=; for file in benchmarks/[!_]*.py; do \
		[ -e "$$file" ] || continue; \
		found=yes; name=$$(basename "$$file" .py); \
		echo "== $$name"; $(BIN)/python -m "benchmarks.$$name"; \
	done; [ -n "$$found" ] || echo "there are no benchmarks in benchmarks/ yet"

gpu-tiny: $(READY)  ## the GPU benchmark's code, with a tiny model on the CPU
	$(BIN)/python -m benchmarks.gpu --device cpu --tiny

packages:  ## Debian's packages without which some tests are skipped; as root
	@dpkg -s $(PACKAGES) >/dev/null 2>&1 || \
		{ apt-get -qq update && apt-get -qq install -y --no-install-recommends $(PACKAGES); }

clean:  ## remove the environment, caches and runs
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis runs build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so a set-up that was cut short is done again.
$(READY): pyproject.toml constraints.txt
	@echo "setting up .venv, which takes a minute or two the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@
