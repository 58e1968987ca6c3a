.PHONY: check lint test test-all

check: lint test

lint:
	ruff format --check .
	ruff check .
	pyright

test:
	pytest

test-all: test
	pytest -n 0 -m "slow or chaos"
