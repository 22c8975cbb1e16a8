# Each target sets itself up: .venv, with the versions of constraints.txt. `make PYTHON=python3.12 test` uses another
# Python (3.11 or newer), `make demo RAW=path/to/ml-latest-small` real files.

bin := .venv/bin
key := $(subst /,_,$(PYTHON))
inputs := pyproject.toml constraints.txt scripts/setup.sh

.PHONY: demo test test-slow check bench docs
.NOTPARALLEL:

demo: .venv/ready-demo$(key)
	$(bin)/recspec demo $(if $(RAW),--raw "$(RAW)")

test: .venv/ready-dev$(key)
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n 2

test-slow: .venv/ready-dev$(key)
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -m slow

check: .venv/ready-dev$(key)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy

bench: .venv/ready-dev$(key)
	for file in benchmarks/[a-z]*.py; do echo "== $$file" && $(bin)/python "$$file" || exit 1; done

docs: .venv/ready-dev$(key)
	$(bin)/python -m scripts.write_tables
	$(bin)/python -m pytest tests/test_docs.py

.venv/ready-%$(key): $(inputs)
	PYTHON="$(PYTHON)" scripts/setup.sh $*
	touch $@
