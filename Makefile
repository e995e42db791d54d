# make demo    CartPole over RPC, trained until solved (about two minutes on 2 cores)
# make test    the whole test suite, on the CPU
# make lint    ruff
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/ready
	$(BIN)/python rpc_rl/main.py --world_size 3

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .

bench: .venv/ready
	$(BIN)/python benchmarks/rpc_rl.py

.venv/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

clean:
	rm -rf .venv outputs
