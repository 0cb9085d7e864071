# make demo    train an orthogonal vision transformer and show the result
# make test    style, types, then every test
# make bench   time whole optimizer steps against other packages
# make docs    build the documentation into build/docs
#
# The first call creates a virtual environment; PYTHON and VENV choose which. PYTEST_ARGS and
# DEMO_ARGS are passed on: make test PYTEST_ARGS="-k geometry".

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_FOR_BENCH := $(VENV)/.ready-for-bench
READY_FOR_DOCS := $(VENV)/.ready-for-docs

.PHONY: demo test lint bench docs clean

demo: $(READY)
	$(RUN) examples/orthogonal_vit.py $(DEMO_ARGS)

test: lint
	$(RUN) -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY_FOR_BENCH)
	$(RUN) benchmarks/step_time.py
	$(RUN) benchmarks/flows.py
	$(RUN) benchmarks/flops.py
	$(RUN) benchmarks/parametrizations.py
	$(RUN) benchmarks/modules.py

docs: $(READY_FOR_DOCS)
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "open build/docs/index.html"

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[test,examples,ot]"
	touch $@

$(READY_FOR_BENCH): $(READY)
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[bench]"
	touch $@

$(READY_FOR_DOCS): $(READY)
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@
