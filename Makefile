# `make quickstart` and `make test` are all a fresh machine with Python and make needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The package with what the quickstart needs (no bytecode beforehand), and everything for developers on top.
SMALL := $(VENV)/.small
READY := $(VENV)/.ready

.PHONY: quickstart test test-site test-oldest soak gpu lint format docs dist benchmark clean

$(SMALL): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[plots,sklearn]'
	touch $(SMALL)

$(READY): $(SMALL)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

quickstart: $(SMALL)
	$(BIN)/python tutorials/quickstart.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quiet

# Notebooks, the site and its examples, the install, recipes with other libraries, and a pretend device.
test-site: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quiet -m "site and not slow" tests

# Each dependency at its lower bound, with Python 3.11 or 3.12, which these have wheels for.
test-oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(PYTHON) -m tests.oldest > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint $(VENV)-oldest/constraints.txt --editable '.[dev]'
	$(VENV)-oldest/bin/python -m pytest --numprocesses 2 --dist worksteal --quiet --ignore tests/benchmarks \
		--deselect pyro_radial/infer/prediction/sampled_network.py::pyro_radial.infer.prediction.sampled_network.SampledNetwork

# Full counts of kills and damage, which the suite has in a small form, and a plain installation; no part of `make test`.
soak: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quiet --override-ini 'python_files=soak_*.py' tests/soak
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quiet -m slow

# On a machine with a GPU and its own torch, in place: the tests that need one, then a table of times.
gpu:
	$(PYTHON) -m pytest -q -m cuda tests
	PYRO_RADIAL_DEVICE=cuda $(PYTHON) -m pytest -q --noconftest tests/devices/suite.py
	$(PYTHON) -m benchmarks.guides.cuda

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/docs; DOCS_ONLINE=1 links the names of Python, torch, Pyro and BoTorch to their own sites.
docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

# A source archive and a wheel made of it, in dist.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

benchmark: $(READY)
	rm -f build/step_time.json
	$(BIN)/python -m benchmarks.guides.step_time --output build/step_time.json

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist docs/tutorials *.egg-info .pytest_cache .mypy_cache .ruff_cache
