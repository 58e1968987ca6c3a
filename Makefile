.PHONY: check lint test test-all docs

check: lint test

lint:
	ruff format --check .
	ruff check .
	pyright

test:
	pytest

test-all: test
	pytest -n 0 -m "slow or chaos"

docs:
	NO_MKDOCS_2_WARNING=1 mkdocs build
