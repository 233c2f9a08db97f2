# Every target sets up .venv first; nothing is written outside this directory.
PYTHON ?= python3
PYTEST = .venv/bin/pytest -rs --durations=15
# Tests that start no server. Left out of test-fast: the files that take longest.
NO_SERVERS = -n 2 --dist loadfile --ignore tests/e2e --ignore tests/slurm tests
SLOW = tests/test_checkpoint.py tests/test_critic.py tests/test_docs.py tests/test_experiment.py \
	tests/test_packaging.py

.PHONY: demo test test-fast test-slurm docs lint
demo: .venv/ready
	.venv/bin/qurl train quickstart

test: lint docs
	$(PYTEST) $(NO_SERVERS)
	$(PYTEST) tests/e2e

test-fast: .venv/ready
	$(PYTEST) $(addprefix --ignore ,$(SLOW)) $(NO_SERVERS)

test-slurm: .venv/ready  # needs Slurm and root: CONTRIBUTING.md
	$(PYTEST) tests/slurm

docs: .venv/ready
	.venv/bin/mkdocs build --strict

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
