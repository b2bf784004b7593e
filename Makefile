# Everything runs inside .venv, which the first target that needs it creates.
# Only Python 3.11 or newer is required; choose another one with `make PYTHON=python3.12 ...`.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

test slow mutants: export OMP_NUM_THREADS = 1 # many small operations: more threads only wait for one another

.DEFAULT_GOAL := help
.PHONY: help demo test slow mutants bench lint format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## compare methods on two tasks and write a report (a few minutes)
	@$(BIN)/tokensteer demo --force

ifdef FAST
test: $(READY)
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 -m "fast and not slow" $$(grep -rl mark.fast tests --include="test_*.py")
else
test: lint ## lint, then run the tests; FAST=1: the most telling ones, without types, in two minutes
	$(BIN)/pytest -n 2 --dist loadfile --durations 15 --durations-min 5
endif

slow: $(READY) ## run the long statistical tests
	$(BIN)/pytest -m slow -n 2

mutants: $(READY) ## see that the tests notice known mistakes (minutes)
	@$(BIN)/python tools/mutants.py

bench: $(READY) ## measure the cost of steering against a dense baseline (minutes)
	@$(BIN)/python -m benchmarks.run
	@$(BIN)/python -m benchmarks.memory
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(BIN)/python -m benchmarks.kernels; \
		$(BIN)/python -m benchmarks.gpu --grad; \
		for size in "" "--particles 16 --length 1024"; do \
			$(BIN)/python -m benchmarks.gpu --compiled --captured $$size; \
			for memory in 4GiB 2GiB; do \
				$(BIN)/python -m benchmarks.gpu --no-base --grad --captured --memory $$memory $$size; \
			done; \
		done; \
	fi

lint: $(READY) ## check style, formatting, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY) ## mend style and formatting in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/.docs ## write the API reference from the docstrings and build the site in build/site
	@$(BIN)/python tools/write_reference.py
	@$(BIN)/python tools/build_site.py
	@echo "Open build/site/index.html, or serve it with search: $(BIN)/python -m http.server -d build/site"

clean: ## remove the environment, caches, builds and outputs
	rm -rf .venv build dist out .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp: install again whenever the declared dependencies change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("tokensteer needs Python 3.11 or newer, found " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	@echo "Installing tokensteer into .venv (the first time takes a few minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

.venv/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
