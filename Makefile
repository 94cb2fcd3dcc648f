# `make quickstart` and `make test` are all a fresh machine with Python and make needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test soak lint format benchmark clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

quickstart: $(READY)
	$(BIN)/python tutorials/quickstart.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --quiet

# Full counts of kills and damage, which the suite has in a small form; no part of `make test`.
soak: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --quiet --override-ini 'python_files=soak_*.py' tests/soak

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(READY)
	rm -f build/step_time.json
	$(BIN)/python -m benchmarks.guides.step_time --output build/step_time.json

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
