# `make demo` and `make test` set up .venv first; nothing is written outside this directory.
PYTHON ?= python3

.PHONY: demo test test-slurm lint
demo: .venv/ready
	.venv/bin/qurl train quickstart

test: lint
	.venv/bin/pytest -rs -n 2 --dist loadfile --ignore tests/e2e --ignore tests/slurm tests
	.venv/bin/pytest -rs tests/e2e

test-slurm: .venv/ready  # wants Slurm and root: CONTRIBUTING.md
	.venv/bin/pytest -rs tests/slurm

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

.venv/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "Python 3.11 or 3.12 is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -r requirements.txt
	.venv/bin/pip install --no-deps -e .
	touch .venv/ready
