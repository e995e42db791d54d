# make demo    CartPole over RPC, trained until solved (two to six minutes on 2 cores, after the installation)
# make quick   the tests that one runs after each edit
# make test    the test suite, on the CPU, without the tests that are marked slow
# make test-all  all tests, the slow ones too, and learn-check, as to be run each night (about an hour)
# make mutants realistic mistakes, one at a time: does --check see them? (about an hour)
# make learn   the workbook: write a part of a lesson, and its oracle judges it (exercises/README.md)
# make learn-check  do all exercises fail as shipped, and pass when they are solved? (a quarter of an hour)
# make compat  every supported torch, in environments of their own (five hours, 30 GB); writes docs/compatibility.md
# make gpu     every program on the GPU of this machine (half an hour); writes docs/measurements/gpu.md
# make site    the pages as a site in both languages, outputs/site/index.html (half a minute; needs npm)
# make lint    ruff
# make bench   the numbers of the pages, measured again (about two hours)
# make docs    the numbers, tables and code of the pages, written again from docs/results/ and the programs
# make docs-check  do the pages say what the code and docs/results/ say? Part of make test
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo quick test test-all mutants learn learn-check compat gpu site lint bench docs docs-check clean

demo: .venv/ready
	$(BIN)/python rpc_rl/main.py --world_size 3
	@echo "next: . .venv/bin/activate, and then, for example, python p2p_collectives/main.py"

quick: .venv/ready
	$(BIN)/python -m pytest -n 2 -m quick

test: .venv/ready
	$(BIN)/python -m pytest

test-all: .venv/ready
	$(BIN)/python -m pytest -m 'not learn'
	$(MAKE) learn-check

mutants: .venv/ready
	$(BIN)/python -m tests.mutants

learn: .venv/ready
	$(BIN)/python -m exercises

learn-check: .venv/ready
	$(BIN)/python -m pytest -m learn -n 3 --dist worksteal tests/test_exercises.py

compat: .venv/ready
	$(BIN)/python -m benchmarks.compat

gpu: .venv/ready
	$(BIN)/python -m benchmarks.compat --gpu

site: .venv/ready
	$(BIN)/python site/build.py

lint: .venv/ready
	$(BIN)/ruff check .

bench: .venv/ready
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.docs

docs: .venv/ready
	$(BIN)/python -m benchmarks.docs

docs-check: .venv/ready
	$(BIN)/python -m pytest -n 0 tests/test_docs.py tests/test_layout.py

.venv/ready: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv: a minute with the CPU build of torch, several with the CUDA build (README.md)"
	@$(BIN)/pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@

clean:
	rm -rf .venv .compat outputs
