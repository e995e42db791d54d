"""The flags that all examples share, and their validation: bad input ends in one line before any process starts."""

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


class Parser(argparse.ArgumentParser):
    """An argument parser with the shared flags, a default in every help text, and one-line errors.

    Args:
        example: the folder's name, which names the outputs too.
        description: the script's docstring.
        world_size: default number of processes; None if the example finds it out from other flags.
        min_world_size: the fewest processes the example makes sense with.
    """

    def __init__(self, example, description, world_size, min_world_size=1):
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        self.set_defaults(example=example, checkpoint_rank=0, by_hand_master_addr=None)
        add = self.add_argument
        processes = bounded(int, at_least=min_world_size)
        add("--world_size", type=processes, default=world_size, metavar="N",
            help="number of processes" + ("" if world_size else " (default: as many as are needed)"))
        add("--rank", type=bounded(int, at_least=0), metavar="R",
            help="start only this rank, by hand; needs --master_addr (default: start all ranks here)")
        add("--master_addr", metavar="HOST", help="with --rank: the machine of rank 0 (default: none)")
        add("--master_port", type=bounded(int, at_least=1, at_most=65535), default=29500, metavar="PORT",
            help="with --rank: a free port there")
        add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the models compute")
        add("--seed", type=bounded(int, at_least=0), default=0, help="of all random numbers")
        add("--timeout", type=bounded(float, above=0), default=60.0, metavar="S",
            help="seconds that any wait for another process may take")
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
            if args.rank is not None:
                refuse("--rank", args.rank, "no rank: torchrun gives the ranks")
            args.world_size = self._checked("--world_size", os.environ["WORLD_SIZE"])
        elif args.rank is not None:
            if args.world_size is None:
                refuse("--rank", args.rank, "it together with --world_size N")
            if args.rank >= args.world_size:
                refuse("--rank", args.rank, f"a rank below --world_size {args.world_size}")
            args.master_addr = args.master_addr or args.by_hand_master_addr
            if args.master_addr is None:
                refuse("--rank", args.rank, "it together with --master_addr HOST, the machine of rank 0")
        elif args.master_addr is not None:
            refuse("--master_addr", args.master_addr, "it together with --rank, when ranks are started by hand")
        if args.device == "cuda" and not torch.cuda.is_available():
            refuse("--device", "cuda", "auto or cpu: torch sees no GPU here")
        if getattr(args, "resume", False) and args.checkpoint is None:
            refuse("--resume", "given", "it together with --checkpoint FILE, the file to continue from")
        writer = args.checkpoint_rank
        if getattr(args, "checkpoint", None) is not None and not args.resume and starts_rank(args, writer):
            require_writable_folder("--checkpoint", args.checkpoint.parent, args.checkpoint, writer)
        require_writable_folder("--output_dir", args.output_dir)
        return args

    def _checked(self, flag, value):
        try:
            return self._get_value(self._option_string_actions[flag], value)
        except argparse.ArgumentError as error:
            self.error(str(error))

    def error(self, message):
        """One line instead of argparse's usage and line."""
        _say(f"error: {message}")
        raise SystemExit(2)


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
    words = [f"{word} {limit}" for word, limit in
             (("at least", at_least), ("above", above), ("at most", at_most)) if limit is not None]
    accepted = f"{'a whole' if kind is int else 'a'} number {' and '.join(words)}".rstrip()

    def convert(text):
        try:
            value = kind(text)
            valid = math.isfinite(value)
        except (ValueError, OverflowError):
            valid = False
        if (not valid or (at_least is not None and value < at_least) or (above is not None and value <= above)
                or (at_most is not None and value > at_most)):
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give {accepted}")
        return value

    return convert


def refuse(flag, value, accepted, rank=0):
    """End with status 2 and one line that names the flag, its value and what would be accepted.

    Under torchrun every rank gets here, or only the one that needs what is wrong: `rank` says the line, for all.
    """
    _say(f"error: argument {flag}: {str(value)!r} is not accepted; give {accepted}", rank)
    raise SystemExit(2)


def _say(line, rank=0):
    if not dist.is_torchelastic_launched() or os.environ["RANK"] == str(rank):
        print(line, file=sys.stderr, flush=True)


def starts_rank(args, rank):
    """Whether this command starts `rank`: only then must the files of that rank exist here."""
    if dist.is_torchelastic_launched():
        return int(os.environ["RANK"]) == rank
    return args.rank is None or args.rank == rank


def require_writable_folder(flag, folder, shown=None, rank=0):
    """Create `folder` if need be; refuse `flag` if files cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "not writable").lower()
        refuse(flag, shown or folder, f"a place where files can be written ({folder}: {reason})", rank)
