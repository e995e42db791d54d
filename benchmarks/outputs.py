"""Run the commands of the pages, and keep what they print: what a page shows was printed.

    python -m benchmarks.outputs                    all of them, one after the other (ten minutes)
    python -m benchmarks.outputs batch_rl p2p_main  these
    python -m benchmarks.outputs --replays          record the messages of short runs instead

`python -m benchmarks` keeps those of the commands that it measures, too: so table, picture and
output of a page are of the same runs.

`python -m benchmarks.docs` writes them between `<!-- output NAME -->` and `<!-- end -->`, and the
links to the replays after `<!-- replay NAME -->`.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from common.cli import PlainParser

from tracing import replay

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "batch_rl": "python batch_rl/main.py --observers 1 5",
    "batch_rl_check": "python batch_rl/main.py --check",
    "batch_update": "python param_server/batch_update.py",
    "ddp_basic": "python ddp_basic/main.py --world_size 2",
    "ddp_basic_check": "python ddp_basic/main.py --demo basic --check",
    "ddp_batchnorm": "python ddp_basic/pitfalls.py --kind batchnorm",
    "ddp_batchnorm_mended": "python ddp_basic/pitfalls.py --kind batchnorm --mended",
    "ddp_skew": "python ddp_basic/skew.py --slow_rank 1 --delay 0.5 --timeout 2",
    "hybrid": "python ddp_rpc_hybrid/main.py",
    "hybrid_check": "python ddp_rpc_hybrid/main.py --check",
    "hybrid_sharded": "python ddp_rpc_hybrid/sharded_table.py",
    "p2p_blocking": "python p2p_collectives/main.py --demo blocking",
    "p2p_init_env": "python p2p_collectives/init_methods.py --method env",
    "p2p_main": "python p2p_collectives/main.py --world_size 4",
    "p2p_train_check": "python p2p_collectives/train.py --check --world_size 3",
    "param_server": "python param_server/main.py",
    "param_server_check": "python param_server/main.py --check",
    "pipeline_check": "python model_parallel_resnet/main.py --check",
    "pipeline_main": "python model_parallel_resnet/main.py --num_splits 1 2 4",
    "pipeline_8": "python model_parallel_resnet/main.py --num_splits 1 2 4 8",
    "rpc_rl": "python rpc_rl/main.py --world_size 3",
    "rpc_rl_check": "python rpc_rl/main.py --check",
    "rpc_rnn": "python rpc_rnn/main.py",
    "single_machine": "python model_parallel_resnet/single_machine.py",
    "transformer": "python transformer_parallel/main.py --twin",
    "transformer_experts": "python transformer_parallel/experts.py --twin",
    "transformer_pipeline": "python transformer_parallel/pipeline.py --twin",
    "transformer_mesh": "python transformer_parallel/mesh.py --twin",
    "transformer_recompute": "python transformer_parallel/recompute.py --twin",
    "transformer_ring": "python transformer_parallel/ring_attention.py --twin",
    "transformer_tensor": "python transformer_parallel/tensor_parallel.py --twin",
    "transformer_zero": "python transformer_parallel/zero.py --twin",
    "single_machine_check": "python model_parallel_resnet/single_machine.py --check",
}
REPLAYS = {  # program and flags of runs that are short enough to be followed message by message
    "batch_rl": "batch_rl/main.py --observers 3 --num_episode 1 --num_steps 10",
    "batch_update": "param_server/batch_update.py --world_size 4 --arch resnet18 --image_size 32 "
                    "--num_updates 2",
    "deadlock": "p2p_collectives/deadlock.py --kind send_first",
    "deadlock_rpc": "p2p_collectives/deadlock.py --kind rpc",
    "hybrid": "ddp_rpc_hybrid/main.py --epochs 1",
    "p2p": "p2p_collectives/main.py --demo nonblocking --world_size 4",
    "collectives": "p2p_collectives/main.py --demo collectives --world_size 4",
    "param_server": "param_server/main.py --epochs 1 --batch_size 240",
    "pipeline": "model_parallel_resnet/main.py --arch resnet18 --batch_size 8 --image_size 32 "
                "--num_batches 1 --num_splits 4",
    "rpc_rl": "rpc_rl/main.py --max_episodes 2",
    "rpc_rnn": "rpc_rnn/main.py --epochs 1 --batch_size 400",
    "transformer": "transformer_parallel/main.py --ways overlap --steps 2",
    "transformer_experts": "transformer_parallel/experts.py --ways experts --steps 2 --blocks 1",
    "transformer_mesh": "transformer_parallel/mesh.py --ways data_tensor --steps 2 --blocks 1",
    "transformer_pipeline": "transformer_parallel/pipeline.py --ways 1f1b --steps 2 --blocks 4 "
                            "--micro_batches 4",
    "transformer_recompute": "transformer_parallel/recompute.py --ways recompute --steps 2 "
                             "--blocks 2",
    "transformer_ring": "transformer_parallel/ring_attention.py --ways ring --steps 2 --blocks 1",
    "transformer_tensor": "transformer_parallel/tensor_parallel.py --ways tensor --steps 2 "
                          "--blocks 1",
    "transformer_zero": "transformer_parallel/zero.py --ways zero3 --steps 2 --blocks 2",
}
# No picture is kept: they only wait, or the page has one of a longer run.
WITHOUT = ("collectives", "deadlock", "deadlock_rpc", "p2p", "batch_update", "pipeline")
FIRST, LAST = 3, 12  # lines of a longer output that are kept


def path_of(name):
    """Where an output is kept."""
    return ROOT / "docs/results/transcripts" / f"{name}.txt"


def replay_of(name):
    """Where a replay is kept."""
    return ROOT / "docs/results/replays" / f"{name}.json"


def folder_of(command):
    """Where a command, such as `-m tracing rpc_rl/main.py --seed 1`, writes by default."""
    traced = command.startswith("-m tracing ")
    program = Path(command.split()[2 if traced else 0])
    folder = program.parent if program.stem == "main" else program.with_suffix("")
    return str(Path("outputs/trace" if traced else "outputs", folder))


def keep(command, printed):
    """Keep what a command has printed, its middle left out, if a page shows it."""
    lines = printed.splitlines()
    if len(lines) > FIRST + LAST + 1:
        lines[FIRST:-LAST] = ["..."]
    for name in (name for name in COMMANDS if COMMANDS[name] == command):
        path_of(name).parent.mkdir(exist_ok=True)
        path_of(name).write_text("\n".join([f"$ {command}", *lines]) + "\n")


def record(name):
    """Run the program of a replay, and keep its data; a deadlock ends with status 1."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tracing", *shlex.split(REPLAYS[name])]
        done = subprocess.run([*command, "--output_dir", folder], cwd=ROOT, capture_output=True,
                              env={**os.environ, "PICTURE_LANGUAGES": "en,ja"})
        assert done.returncode == name.startswith("deadlock"), (name, done.stderr.decode())
        replay_of(name).parent.mkdir(exist_ok=True)
        replay_of(name).write_text(replay.data_of(Path(folder, "replay.html").read_text()) + "\n")
        for picture in Path(folder).glob("timeline*.png") if name not in WITHOUT else ():
            kept = picture.name.replace("timeline", name)
            replay_of(name).with_name(kept).write_bytes(picture.read_bytes())


def main(argv=None):
    """Run the commands, and write what they print."""
    parser = PlainParser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--replays", action="store_true", help="record the messages of short runs")
    args = parser.parse_args(argv)
    known = REPLAYS if args.replays else COMMANDS
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    if args.replays:
        for name in args.names or REPLAYS:
            record(name)
            print(f"{name}: {replay_of(name).stat().st_size // 1000} kB", flush=True)
        return
    for name in args.names or COMMANDS:
        python = [sys.executable if word == "python" else word
                  for word in shlex.split(COMMANDS[name])]
        done = subprocess.run(python, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        if done.returncode:
            raise SystemExit(f"{COMMANDS[name]}: status {done.returncode}\n{done.stdout}")
        keep(COMMANDS[name], done.stdout)
        print(f"{name}: {path_of(name).relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
