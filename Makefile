# Each target sets itself up: .venv, with the versions of constraints.txt. `make PYTHON=python3.12 test` uses another
# Python (3.11 or newer), `make demo RAW=path/to/ml-latest-small` real files. `make HASHES=1 test` installs only files
# whose SHA-256 stands in requirements.lock.

bin := .venv/bin
key := $(subst /,_,$(PYTHON))
inputs := pyproject.toml constraints.txt scripts/setup.sh

# Settings of the user's own shell that would send packages elsewhere, change what the tests do, or have every process
# compile all sources again (PYTHONDONTWRITEBYTECODE).
unexport PYTHONPATH PYTHONHOME PYTHONWARNINGS PYTHONOPTIMIZE PYTHONDONTWRITEBYTECODE PIP_TARGET PIP_PREFIX PIP_USER PYTEST_ADDOPTS

.PHONY: demo test test-slow moto check check-kernels bench bench-all findings docs notebooks sbom lock dist
.NOTPARALLEL:

demo: .venv/ready-demo$(key)
	@$(bin)/recspec demo $(if $(RAW),--raw "$(RAW)")

# Three workers on two cores: a fifth of the time, a test waits for a process of its own.
test: .venv/ready-dev$(key)
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n 3 --dist worksteal

test-slow: .venv/ready-dev$(key) .venv/moto/bin/moto_server
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -m slow

# An S3 server for tests/stores/test_s3.py. It has an environment of its own: botocore wants an older python-dateutil.
moto: .venv/moto/bin/moto_server

.venv/moto/bin/moto_server: .venv/ready-dev$(key)
	$(bin)/python -m venv .venv/moto
	.venv/moto/bin/python -m pip install --quiet 'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5

check: .venv/ready-dev$(key)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy

# Every Triton kernel compiled for GPUs that need not be here: registers, shared memory, spills. Two minutes; see
# `make check-kernels ARGS=--help`.
check-kernels: .venv/ready-dev$(key)
	OMP_NUM_THREADS=1 $(bin)/python -m scripts.check_kernels $(ARGS)

# Training of every model beside its peers, one table; minutes with `make bench ARGS=--quick`, most of an hour without.
bench: .venv/ready-dev$(key)
	$(bin)/python benchmarks/training.py $(ARGS)

# Everything else that is measured on a CPU, one benchmark after the other: hours. benchmarks/stress/gpu_lease.py needs a GPU, and
# benchmarks/same_results.py two commits.
bench-all: bench
	for file in $(filter-out benchmarks/training.py benchmarks/same_results.py %_vs_peers.py %/gpu_lease.py,$(wildcard benchmarks/[a-z]*.py benchmarks/stress/[a-z]*.py)); do \
		echo "== $$file" && $(bin)/python "$$file" || exit 1; done

# The surprises of other libraries, one script each, by PyPI: half a minute each. Says which changed, and how long all took.
findings:
	@changed=""; started=$$(date +%s); for file in findings/*.sh; do \
		log=$$(PYTHON="$(or $(PYTHON),python3)" bash "$$file" 2>&1) && echo "as described  $$file" || { \
			echo "CHANGED       $$file"; printf '%s\n' "$$log" | tail -5; changed="$$changed $$file"; }; \
	done; echo "$$(( $$(date +%s) - started )) seconds; changed:$${changed:- none}"; test -z "$$changed"

# The documentation site: its generated tables, then the pages. It opens in a browser without a server.
docs: .venv/ready-dev$(key)
	$(bin)/python -m scripts.write_tables
	$(bin)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/site
	@echo "build/site/index.html"

# The outputs that the notebooks keep, anew: run it after a change of a notebook.
notebooks: .venv/ready-dev$(key)
	$(bin)/python -m scripts.run_notebooks

# requirements.lock anew, after a change of constraints.txt.
lock: .venv/ready-demo$(key)
	$(bin)/python -m venv .venv/lock
	.venv/lock/bin/python -m pip install --quiet uv==0.13.9
	{ sed -n '/^#/p' requirements.lock; .venv/lock/bin/uv pip compile constraints.txt --no-config --universal --no-deps \
		--default-index https://pypi.org/simple --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet; \
	} > .venv/requirements.lock
	mv .venv/requirements.lock requirements.lock

# The wheel and the source archive in dist/, installed and used in blank environments.
dist: .venv/ready-demo$(key)
	$(bin)/python -m scripts.check_dist

# What the demo's environment holds, as a CycloneDX bill of materials, by a tool in an environment of its own.
sbom: .venv/ready-demo$(key)
	$(bin)/python -m venv .venv/sbom
	.venv/sbom/bin/python -m pip install --quiet cyclonedx-bom==7.5.0
	.venv/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(bin)/python

.venv/ready-%$(key): $(inputs)
	@PYTHON="$(PYTHON)" HASHES="$(HASHES)" scripts/setup.sh $*
	@touch $@
