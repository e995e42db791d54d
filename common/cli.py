"""The flags that all examples share; bad input ends in one line before any process starts."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from common.environment import address_of
from common.limits import (  # noqa: F401  lessons import some of these names from here
    given,
    refuse,
    require_file,
    require_memory,
    require_processes,
    require_threads,
    require_writable_file,
    require_writable_folder,
    shortened,
)
from common.picture import asked_for

import torch
import torch.distributed as dist

# Generators get seeds that are up to a million times larger, and these must stay below 2**63.
LARGEST_SEED = 2**31 - 1
LARGEST_LR = 1e30  # Adam divides it by numbers below 1, and the result must be a float32
TRANSPORTS = ("shm", "ibv", "uv")  # of TensorPipe: shared memory, InfiniBand, TCP
LARGEST_INT = 2**63 - 1  # that tensors and their libraries can hold
MOST_PROCESSES = 2**16  # on all machines together
SHORTEST_S = 0.01  # some libraries round shorter times to 0, which means "forever" to them
LONGEST_S = 10_000_000.0  # a third of a year: the timers of all libraries can hold it
# Flags that may change when a training run continues from a checkpoint: its length, the places of
# its files, its output. The characters in the checkpoint show whether --corpus has the same text.
MAY_CHANGE = {"checkpoint", "resume", "data_dir", "corpus", "log_interval", "epochs",
              "max_episodes", "reward_threshold"}
RESUME = "with the same flags, except the length, the number of ranks and the places of files"


class PlainParser(argparse.ArgumentParser):
    """A parser that shows a default in every help text and refuses in one line."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """End with one line, instead of argparse's usage and line."""
        refuse(shortened(message, 500))

    def parse_args(self, args: Sequence[str] | None = None,
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """Parse; end with one line after a flag that does not exist."""
        args, unknown = self.parse_known_args(args, namespace)
        if unknown:
            refuse(f"unrecognized arguments: {shortened(' '.join(unknown), 400)}"
                   f"{self._advice(unknown[0].partition('=')[0])}")
        return args

    def _advice(self, flag: str) -> str:
        """Return how to correct `flag`, which does not exist; "" if that is unknown."""
        if flag in ("--local-rank", "--local_rank"):
            return "; torch.distributed.launch gives this flag: start the program with torchrun"
        flags = re.findall(r"--\w+", self.format_usage())
        similar = get_close_matches(flag, flags, n=1, cutoff=0.75)
        return f"; did you mean {similar[0]}?" if similar else ""


class Parser(PlainParser):
    """A parser of an example's flags and of the flags that all examples share.

    With `--checkpoint`, `args.settings` holds the flags that a resumed training run must repeat.

    Args:
        example: Folder under outputs/ for the results: "rpc_rl" (main.py), "rpc_rl/fast".
        description: Docstring of the script.
        world_size: Default number of processes; None if other flags determine it.
        min_world_size: Smallest useful number of processes.
        distributed: False for an example of one process: no ranks, no timeout, not under torchrun.
        rpc: Whether the processes use RPC, which opens many files.
    """

    def __init__(self, example: str, description: str, world_size: int | None = 1,
                 min_world_size: int = 1, distributed: bool = True, rpc: bool = False) -> None:
        self.own_flags = []  # flags of this program alone
        super().__init__(description)
        self.distributed, self.rpc = distributed, rpc
        self.set_defaults(example=example, checkpoint_rank=0, default_master_addr=None,
                          world_size=1, rank=None)
        self.common = self.add_argument_group("flags that every program has")
        add = self.common.add_argument
        if distributed:
            processes = bounded(int, at_least=min_world_size, at_most=MOST_PROCESSES)
            found_out = "" if world_size else " (default: what the other flags need)"
            add("--world_size", type=processes, default=world_size, metavar="N",
                help=f"number of processes{found_out}")
            add("--rank", type=bounded(int, at_least=0), metavar="R",
                help="manual launch: start only this rank; needs --master_addr "
                     "(default: start all ranks here)")
            add("--master_addr", type=host, metavar="HOST",
                help="manual launch: the machine of rank 0 (default: none)")
            add("--master_port", type=bounded(int, at_least=1, at_most=65535), default=29500,
                metavar="PORT", help="manual launch: a free port on the machine of rank 0")
            # macOS has forkserver, too, but there torch's libraries may not survive a fork.
            add("--start_method", choices=["forkserver", "spawn"],
                default="forkserver" if sys.platform == "linux" else "spawn",
                help="method that starts the processes; mp.spawn uses spawn")
            seconds = bounded(float, at_least=SHORTEST_S, at_most=LONGEST_S)
            add("--timeout", type=seconds, default=60.0, metavar="S",
                help="longest time in seconds to wait for another process")
        add("--device", choices=["auto", "cpu", "cuda"], default="auto",
            help="device of the models")
        add("--seed", type=bounded(int, at_least=0, at_most=LARGEST_SEED), default=0,
            help="seed for all random number generators")
        add("--output_dir", type=Path, default=Path("outputs", example), metavar="DIR",
            help="folder for metrics.json and the pictures")
        if example.startswith("benchmark"):  # it has no oracle
            self.set_defaults(check=False)
        else:
            add("--check", action="store_true",
                help="compare the example with a single-process reference, step by step")

    def add_argument(self, *names: str, **options) -> argparse.Action:
        """Add a flag of this program alone; see `argparse`."""
        action = super().add_argument(*names, **options)
        self.own_flags.append(action)
        return action

    def add_checkpoint_flags(self, rule: str = RESUME) -> None:
        """Add `--checkpoint FILE` and `--resume`.

        Rank 0 writes the file, unless `set_defaults(checkpoint_rank=...)` names another rank.

        Args:
            rule: Which flags a resumed run must repeat, in words for the help text.
        """
        self.add_argument("--checkpoint", type=Path, metavar="FILE",
                          help="file for the state of the training run (default: none)")
        self.add_argument("--resume", action="store_true",
                          help=f"continue from --checkpoint, {rule}")

    def parse_args(self, args: Sequence[str] | None = None,
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """Parse and validate.

        Raises:
            SystemExit: 2 after one line with the flag, its value and the accepted values.
        """
        args = super().parse_args(args, namespace)
        self._check_ranks(args)
        if getattr(args, "lr", 0) > LARGEST_LR:
            refuse(f"--lr {args.lr:g} must be at most {LARGEST_LR:g}")
        require_threads()
        asked_for()  # refuses a language of PICTURE_LANGUAGES that no picture has
        transports = os.environ.get("RPC_TRANSPORTS", "")
        if transports and not set(transports.split(",")) <= set(TRANSPORTS):
            refuse(f"RPC_TRANSPORTS={shortened(transports)} must be one or more of "
                   f"{','.join(TRANSPORTS)}", None)
        if args.device == "cuda" and not torch.cuda.is_available():
            refuse("--device cuda needs a GPU, and torch sees none here; give auto or cpu", None)
        checkpoint = getattr(args, "checkpoint", None)
        if getattr(args, "resume", False) and checkpoint is None:
            refuse("--resume requires --checkpoint FILE, the file to continue from")
        if checkpoint is not None and starts_rank(args, args.checkpoint_rank):
            require_writable_file("--checkpoint", checkpoint, args.checkpoint_rank)
        require_writable_folder("--output_dir", args.output_dir, rank=None)
        if hasattr(args, "checkpoint"):
            args.settings = {name: getattr(args, name) for name in self._settings()}
        return args

    def _settings(self) -> list[str]:
        """Return the names of the flags that a resumed training run must repeat."""
        return ["seed", *(action.dest for action in self.own_flags
                          if action.dest not in MAY_CHANGE | {"help"})]

    def _check_ranks(self, args: argparse.Namespace) -> None:
        """Refuse ranks that this command cannot start; use torchrun's world size."""
        if dist.is_torchelastic_launched():
            if not self.distributed and os.environ["WORLD_SIZE"] != "1":
                refuse("this example is one process, which drives all devices: "
                       "start it with python, not torchrun")
            if args.rank is not None:
                refuse(f"--rank {args.rank} cannot be given under torchrun, which gives the ranks")
            if self.distributed:
                args.world_size = super().parse_args(
                    ["--world_size", os.environ["WORLD_SIZE"]]).world_size
        elif args.rank is not None:
            if args.world_size is None:
                refuse(f"--rank {args.rank} requires --world_size N")
            if args.rank >= args.world_size:
                refuse(f"--rank {args.rank} must be below --world_size {args.world_size}")
            args.master_addr = args.master_addr or args.default_master_addr
            if args.master_addr is None:
                refuse(f"--rank {args.rank} requires --master_addr HOST, the machine of rank 0")
        elif self.distributed:
            require_processes(f"--world_size {args.world_size}", args.world_size or 1, self.rpc)
        if self.distributed and args.rank is None and args.master_addr is not None:
            refuse(f"--master_addr {args.master_addr} requires --rank R: it is for a manual "
                   "launch, rank by rank")


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that keeps the docstring, and adds a default to each text without one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if "(default" in action.help else super()._get_help_string(action)


def bounded(kind: type[int] | type[float], at_least: float | None = None,
            above: float | None = None,
            at_most: float | None = None) -> Callable[[str], int | float]:
    """Make an argparse type: an int or a float within bounds, neither NaN nor infinite.

    Args:
        kind: `int` or `float`.
        at_least, above, at_most: Optional bounds.
    """
    limits = (("at least", at_least), ("above", above), ("at most", at_most))
    words = [f"{word} {limit:.15g}" if isinstance(limit, float) else f"{word} {limit}"
             for word, limit in limits if limit is not None]
    accepted = f"{'a whole' if kind is int else 'a'} number {' and '.join(words)}".rstrip()

    def convert(text):
        try:
            value = kind(text)
            # Python would read 1_0 as ten, and accept the digits of all scripts.
            valid = math.isfinite(value) and text.isascii() and "_" not in text
        except (ValueError, OverflowError):
            valid = False
        refused = f"{shortened(text)!r} is not accepted"
        if (not valid or (at_least is not None and value < at_least)
                or (above is not None and value <= above)
                or (at_most is not None and value > at_most)):
            raise argparse.ArgumentTypeError(f"{refused}; give {accepted}")
        if kind is int and value > LARGEST_INT:
            raise argparse.ArgumentTypeError(f"{refused}; give a smaller number")
        return value

    return convert


def host(text: str) -> str:
    """Accept a host's name or IPv4 address that can be resolved (an argparse type)."""
    try:
        if not text or ":" in text:
            raise OSError
        address_of(text)
    except (OSError, ValueError) as error:
        reason = "give the port with --master_port, and no IPv6" if ":" in text else (
            getattr(error, "strerror", None) or "no such host").lower()
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not accepted; "
            f"give a host's name or IPv4 address ({reason})") from None
    return text


def starts_rank(args: argparse.Namespace, rank: int) -> bool:
    """Return whether this command starts `rank`, whose files must then be on this machine."""
    if dist.is_torchelastic_launched():
        return int(os.environ["RANK"]) == rank
    return args.rank is None or args.rank == rank


def require_own_gpus(args: argparse.Namespace) -> None:
    """Refuse `--device cuda` if several ranks would have to share a GPU."""
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < len(ranks_here(args)):
        refuse(f"--device cuda must be cpu or auto: torch sees {gpus} GPUs, and here each rank "
               "needs its own", rank=None)


def ranks_here(args: argparse.Namespace) -> range:
    """Return the ranks that this command starts; under torchrun, the ranks of this machine."""
    if dist.is_torchelastic_launched():
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    return range(args.world_size) if args.rank is None else range(args.rank, args.rank + 1)


def on_cpu(args: argparse.Namespace) -> bool:
    """Return whether the models compute in main memory, not in the memory of a GPU."""
    return args.device == "cpu" or not torch.cuda.is_available()
