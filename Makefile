# Every chore is one target. Those that a newcomer begins with, demo and the tests, set up what they need by
# themselves; the others change no environment, and say so if it is missing or old.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-rest test-gpu lint format bench reference lock wheel clean clean-machines

SHELL := /bin/bash
DEV := @scripts/bootstrap
READY := @scripts/bootstrap --check

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo:  ## Raise a cluster, train on two of its nodes, bring the run home, take all down, use the model
	@scripts/bootstrap --runtime
	@scripts/demo

test:  ## Before a commit: linters, unit and integration tests, stories on real clusters
	$(DEV)
	@.venv/bin/python scripts/run_tests.py $@

test-all:  ## Every behaviour once on every platform: test, then test-rest
	$(DEV)
	@.venv/bin/python scripts/run_tests.py $@

test-rest:  ## What test-all adds to test
	$(DEV)
	@.venv/bin/python scripts/run_tests.py $@

test-gpu:  ## The training program's tests and figures, and nvidia-smi's stand-in, on this machine's NVIDIA GPUs
	$(DEV)
	@scripts/test_gpu

lint:  ## All linters; none of them reaches the network
	$(READY)
	@scripts/lint

format:  ## Rewrite the Python files in the house style
	$(READY)
	@.venv/bin/ruff check --quiet --fix-only . && .venv/bin/ruff format .

bench:  ## Side-by-side measurements
	$(READY)
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; .venv/bin/python "$$file"; done

reference:  ## Write the pages, tables and types that come from the code, the tests and the manual
	$(READY)
	@.venv/bin/python scripts/cli_reference.py
	@.venv/bin/python scripts/job_keywords.py
	@.venv/bin/python scripts/spec_reference.py
	@.venv/bin/python scripts/platforms.py

lock:  ## Pin again what pyproject.toml asks for; UPGRADE=1 takes the newest of everything
	@scripts/lock $(if $(UPGRADE),--upgrade)

wheel:  ## Build the wheel and the source archive into dist/
	$(READY)
	@.venv/bin/python -m build --no-isolation

clean:  ## Remove what was built here, the environment too; clusters and runs stay
	@rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .ansible
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-machines:  ## Remove the clusters, machines and processes that killed test runs left; no others
	$(READY)
	@.venv/bin/python -m tests.support.remains
