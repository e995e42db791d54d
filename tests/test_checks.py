"""Every `--check` holds, with flags that differ from their defaults and with extreme ones.

What a program takes from its default, and not from its flag, differs from the oracle here. A new flag of a program
must stand in one of its rows, or in NOT_COMPARED.
"""

import argparse
import importlib
from pathlib import Path

from common.program import belonging_to

import pytest

from tests.helpers import slow_but

TEXT = Path(__file__).parent.parent / "README.ja.md"
RL = "--seed 7 --gamma 0.9 --lr 0.03"
RNN = f"--seed 7 --corpus {TEXT} --batch_size 4 --bptt 11 --ninp 9 --nhid 12 --lr 0.05"
TABLE = "--seed 7 --num_embeddings 30 --embedding_dim 5 --num_classes 3 --lr 0.05 --sparse"
SHARDS = "--seed 7 --arch resnet18 --num_classes 7 --lr 0.01"
UPDATES = "--seed 7 --world_size 3 --arch resnet18 --batch_size 3 --image_size 36 --num_classes 5 --lr 0.01"
LETTERS = "--seed 7 --seq_len 9 --lr 0.01 --blocks 2"
ENVS = f"{RL} --envs sync --num_steps 30"

# program: its rows, and how many comparisons each makes. The first one runs in `make test`, the others are slow; but see
# EACH_ROW and VARIANTS.
CHECKS = {
    "rpc_rl.main": {
        f"{RL} --world_size 4 --total_steps_per_episode 36 --max_episodes 4 --truncation terminal": 12,
        "--seed 5 --gamma 0.5 --world_size 2 --reward_threshold 2": 12,
    },
    "rpc_rl.fast": {
        f"{RL} --world_size 4 --total_steps_per_episode 36 --max_episodes 4": 9,
        "--gamma 0 --world_size 2 --reward_threshold 2 --truncation terminal": 9,
    },
    "batch_rl.main": {
        f"{RL} --observers 3 --envs_per_observer 2 --num_episode 1 --num_steps 30": 16,
        "--observers 1 --gamma 1": 16,
    },
    "batch_rl.vector": {
        f"{ENVS} --observers 3 --envs_per_observer 6 --num_episode 1": 14,
        "--observers 2 --envs_per_observer 3 --gamma 1": 14,
    },
    "batch_rl.until_solved": {
        f"{ENVS} --world_size 2 --envs_per_observer 5 --max_episodes 1": 15,
        "--envs_per_observer 4 --reward_threshold 4 --gamma 1": 15,
    },
    "ddp_basic.main": {
        "--seed 7 --world_size 3 --steps 4 --lr 0.1": 24,
        "--world_size 1 --steps 1": 24,
    },
    "ddp_basic.skew": {
        "--seed 7 --world_size 3 --steps 4 --lr 0.1 --slow_rank 1 --delay 0.15": 13,
        "--world_size 1 --steps 1": 9,
    },
    "ddp_basic.elastic": {
        "--seed 7 --world_size 3 --global_batch_size 48 --lr 0.05": 26,
        "--world_size 1 --global_batch_size 1437": 26,
    },
    "ddp_basic.pitfalls": {
        f"--kind {kind} --seed 7 --world_size 3 --lr 0.05 --steps 5": 2
        for kind in ("unused", "uneven", "batchnorm", "batchnorm --mended")
    },
    "ddp_rpc_hybrid.main": {
        f"{TABLE} --world_size 5": 19,
        "--world_size 3 --num_embeddings 1 --embedding_dim 1 --num_classes 2": 18,
    },
    "ddp_rpc_hybrid.sharded_table": {f"{TABLE} --world_size 3": 76},
    "model_parallel_resnet.main": {
        f"{SHARDS} --num_splits 1 3": 14,
        "--arch resnet18 --num_splits 8 1 2 3 --num_classes 2": 14,  # one that the default leaves out; and four
    },
    "model_parallel_resnet.schedules": {
        f"{SHARDS} --num_splits 3 --batch_size 6 --schedule 1f1b": 14,
        "--arch resnet18 --num_splits 2": 14,
        **{f"{SHARDS} --num_splits 2 --schedule {name}": 14 for name in ("interleaved", "zero_bubble", "zero_bubble_v")},
    },
    "model_parallel_resnet.single_machine": {"--seed 7 --lr 0.03": 10, "--split_sizes 1 2 4": 10},
    "p2p_collectives.deadlock": {
        **{f"--kind {kind}": 5 for kind in ("other_collective", "other_shape", "one_fewer")},
        "--kind rpc --world_size 3": 5,
        "": 5,
    },
    "p2p_collectives.init_methods": {"": 13, "--world_size 2 --method tcp": 5},
    "p2p_collectives.main": {"": 21, "--world_size 2": 21},
    "p2p_collectives.ring_allreduce": {f"--seed 7 --world_size {ranks}": 20 for ranks in (5, 1, 2)},
    "p2p_collectives.shared_memory": {"": 50, "--seed 7 --world_size 1": 34, "--world_size 3 --sizes 12000 --ranks_per_machine 1": 42},
    "p2p_collectives.train": {
        "--seed 7 --world_size 3 --global_batch_size 120 --lr 0.05": 22,
        "--world_size 2 --global_batch_size 1438": 22,
    },
    "p2p_collectives.train_flat": {"--seed 7 --world_size 3 --global_batch_size 120 --lr 0.05": 22},
    "p2p_collectives.train_ddp": {"--seed 7 --world_size 3 --global_batch_size 120 --lr 0.05": 22},
    "param_server.main": {
        "--seed 7 --world_size 4 --batch_size 5 --lr 0.02": 17,
        "--world_size 2 --batch_size 1": 16,
    },
    "param_server.async_server": {"--seed 7 --world_size 4 --batch_size 5 --lr 0.02": 17},
    "param_server.batch_update": {UPDATES: 16, "--seed 11 --world_size 3 --arch resnet18 --batch_size 2 --image_size 8 --num_classes 1": 16},
    "rpc_rnn.main": {f"{RNN} --nlayers 3 --dropout 0.5": 21, "--seed 7 --batch_size 1": 22},
    "transformer_parallel.main": {f"{LETTERS} --world_size 3 --batch_size 12 --bucket_kb 300 --accumulate 2": 37},
    "transformer_parallel.zero": {f"{LETTERS} --world_size 3 --batch_size 6": 54, "--world_size 4 --batch_size 4 --seq_len 1 --blocks 1 --steps 1": 54},
    "transformer_parallel.experts": {
        f"{LETTERS} --world_size 3 --batch_size 6 --blocks 3 --experts 6 --capacity_factor 0.8 --balance 0.1": 49,
        "--world_size 2 --batch_size 2 --seq_len 4 --blocks 1 --experts 2 --capacity_factor 0.1 --balance 0": 49,
        "--world_size 2 --batch_size 2 --seq_len 4 --blocks 1 --experts 2 --capacity_factor 3": 49,  # places for more than there are
    },
    "transformer_parallel.mesh": {
        "--seed 7 --lr 0.01 --batch_size 4 --seq_len 4 --blocks 3 --micro_batches 1 --ways data_tensor data_pipeline moved": 28,
        "--world_size 4 --batch_size 4 --seq_len 4 --blocks 5 --micro_batches 1": 64,  # all ways, the last of which take long
        f"{LETTERS} --world_size 6 --row 3 --batch_size 12 --seq_len 12 --blocks 7 --micro_batches 2": 64,
        "--world_size 2 --row 1 --batch_size 2 --seq_len 4 --blocks 2 --micro_batches 1": 64,
    },
    "transformer_parallel.recompute": {
        f"{LETTERS} --world_size 3 --batch_size 6 --blocks 3 --every 2": 54,
        f"{LETTERS} --world_size 2 --batch_size 2 --steps 1 --ways plain plain bf16": 22,  # a way twice; a single step
    },
    "transformer_parallel.ring_attention": {
        f"{LETTERS} --world_size 3 --batch_size 2 --seq_len 12": 42, "--world_size 2 --batch_size 1 --seq_len 4 --blocks 1": 42,
    },
    "transformer_parallel.tensor_parallel": {f"{LETTERS} --world_size 3 --batch_size 4": 34, "--world_size 2 --batch_size 1 --seq_len 2 --blocks 1": 34},
    "transformer_parallel.pipeline": {
        f"{LETTERS} --world_size 3 --batch_size 6 --micro_batches 6 --blocks 7": 57,
        "--world_size 2 --batch_size 2 --seq_len 4 --micro_batches 2 --blocks 4": 57,
    },
}
# As far as the flags go: one step, one image, one observer, no discount or no momentum, the largest seed, ranks among which
# nothing divides. For programs that have no such row above, and how many comparisons each makes.
LARGEST = "--seed 2147483647"
EXTREMES = {
    "rpc_rl.main": (f"{LARGEST} --gamma 0 --world_size 2 --total_steps_per_episode 1 --max_episodes 1 --log_interval 1", 12),
    "rpc_rl.fast": ("--gamma 1 --world_size 6 --total_steps_per_episode 7 --max_episodes 1", 9),
    "batch_rl.main": (f"{LARGEST} --observers 7 --num_steps 1 --num_episode 1 --gamma 0", 16),
    "batch_rl.vector": ("--observers 1 --envs_per_observer 1 --num_steps 1 --gamma 0", 14),
    "batch_rl.until_solved": ("--world_size 2 --envs_per_observer 1 --gamma 0 --num_steps 2 --reward_threshold 1 --max_episodes 1", 15),
    "ddp_basic.main": (f"{LARGEST} --world_size 7 --steps 1", 24),
    "ddp_basic.skew": ("--world_size 5 --steps 1 --slow_rank 4 --delay 0", 9),
    "ddp_basic.elastic": (f"{LARGEST} --world_size 5 --global_batch_size 1435", 26),
    "ddp_basic.pitfalls": ("--kind uneven --world_size 5 --steps 1", 2),
    "ddp_rpc_hybrid.main": (f"{LARGEST} --world_size 7 --num_embeddings 1 --embedding_dim 1 --num_classes 2", 19),
    "ddp_rpc_hybrid.sharded_table": ("--world_size 5 --num_embeddings 2 --embedding_dim 1 --num_classes 2", 76),
    "model_parallel_resnet.schedules": ("--arch resnet18 --num_splits 1 --num_classes 2", 14),
    "p2p_collectives.deadlock": ("--kind one_fewer --world_size 5", 5),
    "p2p_collectives.init_methods": ("--world_size 1", 13),
    "p2p_collectives.main": ("--world_size 7", 21),
    "p2p_collectives.shared_memory": ("--world_size 5 --sizes 20", 42),
    "p2p_collectives.train_flat": (f"{LARGEST} --world_size 5 --global_batch_size 7 --lr 0.3", 22),
    "p2p_collectives.train_ddp": ("--world_size 7 --global_batch_size 7 --lr 0.001", 22),
    "param_server.async_server": (f"{LARGEST} --world_size 6 --batch_size 1437", 17),
}
VARIANTS = ("p2p_collectives.train_flat", "p2p_collectives.train_ddp", "param_server.async_server", "p2p_collectives.shared_memory")  # slow: most have another program's oracle
EACH_ROW = ("ddp_basic.pitfalls",)  # in `make test`: each is another mistake
QUICK = ("rpc_rl.fast", "ddp_rpc_hybrid.main", "rpc_rnn.main", "p2p_collectives.main")
PLACE = {"help", "check", "rank", "master_addr", "master_port", "start_method", "timeout", "device", "output_dir"}
OWN = "each check has a value of its own, which is not the default"
NOT_COMPARED = {  # flag, or (program, flag): why no row has it
    "--twin": "a check has torch's own in any case",
    "--epochs": OWN,
    "--num_updates": OWN,
    "--repeats": OWN,
    "--sizes": OWN,
    "--image_size": OWN,
    "--num_batches": OWN,
    "--num_repeat": OWN,
    "--split_size": "which of those measured the picture shows",
    "--checkpoint": OWN + "; and tests of resumed trainings",
    "--resume": OWN + "; and tests of resumed trainings",
    "--dataset": "test_data.py",
    "--data_dir": "test_data.py",
    "--log_interval": "how often a line is printed",
    "--demo": "all of them run",
    "--ways": "all of them run",
    "--steps": OWN,
    "--file": "test_two_terminals",
    "--devices": "needs GPUs",
    ("p2p_collectives.main", "--seed"): "nothing is drawn",
    ("p2p_collectives.deadlock", "--seed"): "nothing is drawn",
    "--mended": "both forms run",
    ("p2p_collectives.init_methods", "--seed"): "nothing is drawn",
    **{(program, "--batch_size"): OWN for program in CHECKS if program.startswith("model_parallel_resnet.")},
    **{(program, "--world_size"): "follows from --observers, or is fixed" for program in CHECKS
       if program.startswith(("batch_rl.", "model_parallel_resnet.", "rpc_rnn.")) and not program.endswith("single_machine")},
}


def flags_of(program):
    """The flags of a program's own, and --seed and --world_size: what a row can change."""
    parser = importlib.import_module(program).build_parser()
    return {action.option_strings[0]: action for action in parser._actions
            if action.dest not in PLACE and action.default is not argparse.SUPPRESS}


@pytest.mark.parametrize(("program", "flags", "comparisons"), [
    pytest.param(program, flags, comparisons, marks=(
        pytest.mark.slow if program in VARIANTS or (flags != [*rows][0] and program not in EACH_ROW)
        else pytest.mark.quick if program in QUICK else []))
    for program, rows in CHECKS.items() for flags, comparisons in rows.items()])
def test_check_passes(program, flags, comparisons, tmp_path, capfd):
    differences = importlib.import_module(program).main(["--check", "--output_dir", str(tmp_path), *flags.split()])
    out, err = capfd.readouterr()
    assert out.count(": ok\n") == len(differences) == comparisons
    assert err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("program", "flags", "comparisons"), slow_but(
    [(program, *row) for program, row in EXTREMES.items()],
    "rpc_rl.main", "batch_rl.main", "ddp_basic.elastic", "p2p_collectives.main"))
def test_check_passes_at_the_limits(program, flags, comparisons, tmp_path, capfd):
    test_check_passes(program, flags, comparisons, tmp_path, capfd)


@pytest.mark.parametrize("program", EXTREMES)
def test_the_flags_of_the_limits_are_there(program):
    """Most of these rows are slow."""
    importlib.import_module(program).build_parser().parse_args(EXTREMES[program][0].split())


class ReachedError(Exception):
    """Has the flags with which a check was about to start its ranks."""


def reached(program, row, monkeypatch):
    """The flags with which the ranks of a check start, which shortens trainings; those given, where it starts none itself."""
    def launch(_, args, *others):
        raise ReachedError(args)

    module = importlib.import_module(program)
    args = module.build_parser().parse_args(["--check", *row.split()])
    file = Path(module.__file__)
    check = importlib.import_module(f"{file.parent.name}.{belonging_to(file, 'check')}").check
    if "launch" not in check.__globals__:
        return args
    monkeypatch.setitem(check.__globals__, "launch", launch)
    with pytest.raises(ReachedError) as stop:
        check(module, args)
    return stop.value.args[0]


@pytest.mark.parametrize("program", CHECKS)
def test_every_flag_is_compared(program, monkeypatch):
    """One row, at least, gives it a value that is not its default, and the ranks start with that: no check drops it."""
    usual, *rows = (reached(program, row, monkeypatch) for row in ["", *CHECKS[program]])
    for flag, action in flags_of(program).items():
        moved = any(getattr(row, action.dest) != getattr(usual, action.dest) for row in rows)
        assert moved or flag in NOT_COMPARED or (program, flag) in NOT_COMPARED, flag


def test_what_is_not_compared_is_there():
    """A reason for a flag that no program has any more would hide one that comes."""
    flags = {(program, flag) for program in CHECKS for flag in flags_of(program)}
    assert not {entry for entry in NOT_COMPARED if not any(entry in ((program, flag), flag) for program, flag in flags)}
