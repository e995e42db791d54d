# make demo    CartPole over RPC, trained until solved (about 75 s on 2 cores, after the installation)
# make quick   the tests that one runs after each edit
# make test    the whole test suite, on the CPU
# make soak    kills, full disks and mixed runs, again and again; writes docs/reliability.md
# make mutants  realistic mistakes, one at a time: does --check see them?
# make lint    ruff
# make bench   the numbers of the READMEs, measured again
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo quick test soak mutants lint bench clean

demo: .venv/ready
	$(BIN)/python rpc_rl/main.py --world_size 3

quick: .venv/ready
	$(BIN)/python -m pytest -m quick -n 2

test: .venv/ready
	$(BIN)/python -m pytest -n 2

soak: .venv/ready
	$(BIN)/python -m tests.soak

mutants: .venv/ready
	$(BIN)/python -m tests.mutants

lint: .venv/ready
	$(BIN)/ruff check .

bench: .venv/ready
	$(BIN)/python -m benchmarks.start --commands --output_dir docs/results/benchmark_start
	$(BIN)/python rpc_rl/main.py --world_size 3 --output_dir docs/results/rpc_rl
	$(BIN)/python -m benchmarks.rpc_rl --output_dir docs/results/benchmark_rpc_rl
	$(BIN)/python -m benchmarks.rpc_rl_seeds --seeds 0 1 2 3 4
	$(BIN)/python ddp_basic/main.py --demo skew --slow_rank 1 --delay 0.5 --timeout 2 --output_dir docs/results/ddp_basic
	$(BIN)/python p2p_collectives/ring_allreduce.py --repeats 31 --output_dir docs/results/p2p_collectives
	$(BIN)/python rpc_rnn/main.py --output_dir docs/results/rpc_rnn
	$(BIN)/python -m benchmarks.rpc_rnn --output_dir docs/results/benchmark_rpc_rnn
	$(BIN)/python model_parallel_resnet/single_machine.py --num_repeat 7 --output_dir docs/results/model_parallel_resnet_single
	$(BIN)/python ddp_rpc_hybrid/main.py --output_dir docs/results/ddp_rpc_hybrid
	$(BIN)/python -m benchmarks.ddp_rpc_hybrid
	$(BIN)/python param_server/main.py --output_dir docs/results/param_server
	$(BIN)/python -m benchmarks.param_server --output_dir docs/results/benchmark_param_server
	$(BIN)/python param_server/batch_update.py --timeline --output_dir docs/results/param_server_batch_update
	$(BIN)/python batch_rl/main.py --num_episode 6 --output_dir docs/results/batch_rl
	$(BIN)/python batch_rl/main.py --observers 5 --envs_per_observer 16
	$(BIN)/python batch_rl/main.py --mode train --observers 2 --envs_per_observer 8 --output_dir docs/results/batch_rl_train
	for n in 5 10; do $(BIN)/python -m benchmarks.batch_rl --observers $$n --num_episode 8; done
	$(BIN)/python model_parallel_resnet/main.py --num_splits 1 2 4 8 --timeline --output_dir docs/results/model_parallel_resnet
	$(BIN)/python -m benchmarks.model_parallel_resnet --num_splits 2 4 8 --output_dir docs/results/benchmark_model_parallel_resnet
	for sync in per_parameter flat ddp; do $(BIN)/python p2p_collectives/train.py --sync $$sync; done

.venv/ready: requirements.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@

clean:
	rm -rf .venv outputs
