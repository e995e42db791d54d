# make demo         CartPole over RPC, trained until solved (two to five minutes on 2 cores, after the installation)
# make test         the test suite on the CPU (five minutes on 2 cores), without the tests marked slow
# make quick        the tests to run after each edit (half a minute)
# make learn        the workbook: write a part of a lesson, and the lesson's check judges it (exercises/README.md)
# make learn-check  does every exercise fail as shipped and pass when it is solved?
# make docs         write code, output, numbers and tables into the pages
# make bench        measure the numbers of the pages again (two hours), then make docs
# make site         the pages as a site in both languages: outputs/site/index.html (needs npm)
# make compat       every supported torch in its own environment (five hours, 30 GB): docs/compatibility.md
# make gpu          every program on the GPU of this machine (half an hour): docs/measurements/gpu.md
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check -c constraints.txt

.PHONY: demo test quick learn learn-check docs bench site compat gpu

demo: .venv/ready
	$(BIN)/python rpc_rl/main.py --world_size 3
	@echo "next: . .venv/bin/activate, and then, for example, python p2p_collectives/main.py"

test: .venv/dev
	$(BIN)/python -m pytest

quick: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 -m quick

learn: .venv/ready
	$(BIN)/python -m exercises

learn-check: .venv/dev
	$(BIN)/python -m pytest -m learn -n 3 --dist worksteal tests/test_exercises.py

docs: .venv/ready
	$(BIN)/python -m benchmarks.docs

bench: .venv/ready
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.docs

site: .venv/dev
	$(BIN)/python site/build.py

compat: .venv/ready
	$(BIN)/python -m benchmarks.compat

gpu: .venv/ready
	$(BIN)/python -m benchmarks.compat --gpu

.venv/ready: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv: a minute with the CPU build of torch, several with the CUDA build (README.md)"
	@$(PIP) -r requirements.txt
	touch $@

.venv/dev: .venv/ready requirements-dev.txt
	@$(PIP) -r requirements-dev.txt
	touch $@
