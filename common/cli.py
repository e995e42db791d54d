"""The flags that all examples share, and their validation: bad input ends in one line before any process starts."""

import argparse
import math
import os
import resource
import stat
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from common.worker_env import address_of

LARGEST_SEED = 2**31 - 1  # of which a few thousand seeds of generators are made, which must stay below 2**63
LARGEST_LR = 1e30  # Adam divides it by numbers below 1, and the result must be a float32
LARGEST_INT = 2**63 - 1  # that tensors and their libraries can hold
MOST_PROCESSES = 2**16  # on all machines together
SHORTEST_S = 0.01  # below it, some libraries round to 0, and take that for "for ever"
LONGEST_S = 10_000_000.0  # a third of a year: what the timers of all libraries can hold
FILES_PER_RANK = 4  # that a launcher has open for each rank, at most


class PlainParser(argparse.ArgumentParser):
    """An argument parser without flags: a default in every help text, and one-line errors."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message):
        """One line instead of argparse's usage and line."""
        refuse(shortened(message, 500))


class Parser(PlainParser):
    """The parser of an example, with the shared flags.

    Args:
        example: the folder's name, which names the outputs too.
        description: the script's docstring.
        world_size: default number of processes; None if the example finds it out from other flags.
        min_world_size: the fewest processes the example makes sense with.
        distributed: False for an example of one process: no ranks, no timeout, not under torchrun.
    """

    def __init__(self, example, description, world_size=1, min_world_size=1, distributed=True):
        super().__init__(description)
        self.distributed = distributed
        self.set_defaults(example=example, checkpoint_rank=0, default_master_addr=None, world_size=1, rank=None)
        add = self.add_argument
        if distributed:
            processes = bounded(int, at_least=min_world_size, at_most=MOST_PROCESSES)
            add("--world_size", type=processes, default=world_size, metavar="N",
                help="number of processes" + ("" if world_size else " (default: as many as are needed)"))
            add("--rank", type=bounded(int, at_least=0), metavar="R",
                help="manual launch: start only this rank; needs --master_addr (default: start all ranks here)")
            add("--master_addr", type=host, metavar="HOST", help="with --rank: the machine of rank 0 (default: none)")
            add("--master_port", type=bounded(int, at_least=1, at_most=65535), default=29500, metavar="PORT",
                help="with --rank: a free port there")
            # forkserver would do on macOS too, but there torch's libraries may not survive the fork.
            add("--start_method", choices=["forkserver", "spawn"],
                default="forkserver" if sys.platform == "linux" else "spawn",
                help="how the processes are started; spawn is what mp.spawn does")
            seconds = bounded(float, at_least=SHORTEST_S, at_most=LONGEST_S)
            add("--timeout", type=seconds, default=60.0, metavar="S",
                help="seconds that any wait for another process may take")
        add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the models compute")
        add("--seed", type=bounded(int, at_least=0, at_most=LARGEST_SEED), default=0, help="of all random numbers")
        add("--output_dir", type=Path, default=Path("outputs", example), metavar="DIR",
            help="for metrics.json and the pictures")
        add("--check", action="store_true", help="prove the example against a single process instead of running it")

    def add_checkpoint_flags(self):
        """Add `--checkpoint FILE` and `--resume`; rank 0 writes it, unless `set_defaults(checkpoint_rank=)` says so."""
        self.add_argument("--checkpoint", type=Path, metavar="FILE", help="save the training here (default: nowhere)")
        self.add_argument("--resume", action="store_true", help="continue from --checkpoint")

    def parse_args(self, args=None, namespace=None):
        """Parse and validate; SystemExit(2) after one line that names flag, value and what is accepted."""
        args = super().parse_args(args, namespace)
        if dist.is_torchelastic_launched():
            if not self.distributed and os.environ["WORLD_SIZE"] != "1":
                refuse("this example is one process, which drives all devices: start it with python, not torchrun")
            if args.rank is not None:
                refuse(f"--rank {args.rank} cannot be given under torchrun, which gives the ranks")
            if self.distributed:
                args.world_size = self._checked("--world_size", os.environ["WORLD_SIZE"])
        elif args.rank is not None:
            if args.world_size is None:
                refuse(f"--rank {args.rank} requires --world_size N")
            if args.rank >= args.world_size:
                refuse(f"--rank {args.rank} must be below --world_size {args.world_size}")
            args.master_addr = args.master_addr or args.default_master_addr
            if args.master_addr is None:
                refuse(f"--rank {args.rank} requires --master_addr HOST, the machine of rank 0")
        elif self.distributed:
            require_processes(f"--world_size {args.world_size}", args.world_size or 1)
        if self.distributed and args.rank is None and args.master_addr is not None:
            refuse(f"--master_addr {args.master_addr} requires --rank R: it is for a manual launch, rank by rank")
        if getattr(args, "lr", 0) > LARGEST_LR:
            refuse(f"--lr {args.lr:g} must be at most {LARGEST_LR:g}")
        if args.device == "cuda" and not torch.cuda.is_available():
            refuse("--device cuda needs a GPU, and torch sees none here; give auto or cpu", None)
        if getattr(args, "resume", False) and args.checkpoint is None:
            refuse("--resume requires --checkpoint FILE, the file to continue from")
        if getattr(args, "checkpoint", None) is not None and starts_rank(args, args.checkpoint_rank):
            require_writable_file("--checkpoint", args.checkpoint, args.checkpoint_rank)
        require_writable_folder("--output_dir", args.output_dir, rank=None)
        return args

    def _checked(self, flag, value):
        try:
            return self._get_value(self._option_string_actions[flag], value)
        except argparse.ArgumentError as error:
            self.error(str(error))


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written, and defaults except where the text already tells them."""

    def _get_help_string(self, action):
        return action.help if "(default" in action.help else super()._get_help_string(action)


def bounded(kind, at_least=None, above=None, at_most=None):
    """An argparse type: an int or a float within bounds; NaN and infinity are refused.

    Args:
        kind: `int` or `float`.
        at_least, above, at_most: the bounds, each optional.
    """
    limits = (("at least", at_least), ("above", above), ("at most", at_most))
    words = [f"{word} {limit:.15g}" if isinstance(limit, float) else f"{word} {limit}"
             for word, limit in limits if limit is not None]
    accepted = f"{'a whole' if kind is int else 'a'} number {' and '.join(words)}".rstrip()

    def convert(text):
        try:
            value = kind(text)
            valid = math.isfinite(value)
        except (ValueError, OverflowError):
            valid = False
        if (not valid or (at_least is not None and value < at_least) or (above is not None and value <= above)
                or (at_most is not None and value > at_most)):
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not accepted; give {accepted}")
        if kind is int and value > LARGEST_INT:
            raise argparse.ArgumentTypeError(
                f"{shortened(text)!r} is not accepted; give a smaller number")
        return value

    return convert


def host(text):
    """An argparse type: a host's name or IPv4 address, which can be resolved."""
    try:
        if not text or ":" in text:
            raise OSError
        address_of(text)
    except (OSError, ValueError) as error:
        reason = "give the port with --master_port, and no IPv6" if ":" in text else (
            getattr(error, "strerror", None) or "no such host").lower()
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not accepted; give a host's name or IPv4 address ({reason})") from None
    return text


def memory_bytes():
    """Of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_processes(flags, number):
    """Refuse `flags`, a text, if this machine cannot hold so many processes.

    Each has open files and 100 MB or more. Not for torchrun and manual launches: they may have
    several machines.
    """
    files, memory = resource.getrlimit(resource.RLIMIT_NOFILE)[0], memory_bytes() // 100_000_000
    files = memory if files == resource.RLIM_INFINITY else files // FILES_PER_RANK
    most = max(2, min(files, memory))
    if number > most:
        refuse(f"{flags} is too much for this machine, which can hold at most {most} processes "
               f"({'open files: ulimit -n' if files < memory else 'memory'})")


def refuse(sentence, rank=0):
    """End with status 2 and one line, a whole sentence: "error: --rank 1 requires --master_addr HOST".

    Under torchrun every rank gets here, or only the one that needs what is wrong: `rank` says the
    line, for all. Where machines may differ, it is None, and the first rank of each machine does.
    """
    name, speaker = ("LOCAL_RANK", 0) if rank is None else ("RANK", rank)
    if not dist.is_torchelastic_launched() or os.environ[name] == str(speaker):
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def shortened(text, length=80):
    """A value as the user gave it, but not longer than a line can show."""
    text = str(text)
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 4 :]}"


def given(args, *flags):
    """Flags with their values, as on a command line."""
    words = []
    for flag in flags:
        value = getattr(args, flag)
        value = " ".join(map(str, value)) if isinstance(value, list) else value
        words.append(f"--{flag} {shortened(value)}")
    return " ".join(words)


def starts_rank(args, rank):
    """Whether this command starts `rank`: only then must the files of that rank exist here."""
    if dist.is_torchelastic_launched():
        return int(os.environ["RANK"]) == rank
    return args.rank is None or args.rank == rank


def ranks_here(args):
    """The ranks that this command starts; under torchrun, those of this machine."""
    if dist.is_torchelastic_launched():
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    return range(args.world_size) if args.rank is None else range(args.rank, args.rank + 1)


def on_cpu(args):
    """Whether what the models compute is in the memory of this machine, not in that of its GPUs."""
    return args.device == "cpu" or not torch.cuda.is_available()


def require_memory(args, flags, n_bytes, rank=None):
    """Refuse what does not fit into the memory of this machine.

    Args:
        args: the parsed flags.
        flags: the names of those that ask for it.
        n_bytes: what all `ranks_here` together allocate, at least.
        rank: see `refuse`.
    """
    if n_bytes > memory_bytes():
        refuse(f"{given(args, *flags)} would need {n_bytes / 1e9:.3g} GB of memory or more, and "
               f"this machine has {memory_bytes() / 1e9:.3g} GB; give smaller numbers", rank)


def require_writable_folder(flag, folder, shown=None, rank=0):
    """Create `folder` if need be; refuse `flag` if files cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        refuse(f"{flag} {shortened(shown or folder)} must be a place where files can be written "
               f"({shortened(folder)}: {reason_of(error)})", rank)


def require_file(flag, path, rank=0):
    """Whether the file `path` exists; refuses `flag` if it is something else, or no file's name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # writing to a pipe, or reading from one, could wait for ever
            refuse(f"{flag} {shortened(path)} must be a file, not a folder, a pipe or a device", rank)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        refuse(f"{flag} {shortened(path)} must be a file ({reason_of(error)})", rank)
    return True


def require_writable_file(flag, path, rank=0):
    """Refuse `flag` if `path` cannot be written: its folder, too long a name, not a file."""
    require_writable_folder(flag, path.parent, path, rank)
    if not require_file(flag, path, rank):
        # `report.replacing` writes beside it, to a name that is longer.
        longest = os.pathconf(path.parent, "PC_NAME_MAX") - 30
        if 0 < longest < len(os.fsencode(path.name)):
            refuse(f"{flag} {shortened(path)} must have a shorter name", rank)


def reason_of(error):
    """Why a file cannot be used, in words."""
    return (getattr(error, "strerror", None) or "not a file name").lower()
