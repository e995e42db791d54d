"""Checkpoints: written whole or not at all, read with `weights_only=True`, of the same example."""

import io
import math
from argparse import Namespace
from collections.abc import Callable
from glob import escape
from typing import NoReturn

from common.cli import starts_rank
from common.limits import given, reason_of, refuse, shortened
from common.report import replacing

import torch
from torch import nn


class NotSavedError(Exception):
    """The reason, in words that continue "rank 0 (agent) ..."."""


def save(args: Namespace, state: dict) -> None:
    """Write `state` (tensors and plain Python values) and `args.settings` to `args.checkpoint`.

    Raises:
        NotSavedError: The disk is full, or the folder has become read-only; the file is unchanged.
    """
    whole = io.BytesIO()  # to a file, torch.save would call a full disk "unexpected pos 576 vs 534"
    torch.save({"example": args.example, "settings": args.settings, **state}, whole)
    try:
        with replacing(args.checkpoint) as temporary:
            temporary.write_bytes(whole.getbuffer())
    except OSError as error:
        raise NotSavedError(f"could not write {args.checkpoint}: {error.strerror}") from None


def remove_leftovers(args: Namespace) -> None:
    """Remove the half-written file of a process that was killed."""
    for leftover in args.checkpoint.parent.glob(f".{escape(args.checkpoint.name)}.*.tmp"):
        leftover.unlink(missing_ok=True)


def load(args: Namespace) -> dict:
    """Return the state in `args.checkpoint`, as `save` was given it, on the CPU.

    Raises:
        SystemExit: 2 after one line, if the file is missing, truncated or not a checkpoint of this
            example, or if a number in it is infinite or not a number.
    """
    try:
        whole = io.BytesIO(args.checkpoint.read_bytes())
    except FileNotFoundError:
        reject(args, "must be an existing file with --resume")
    except OSError as error:
        reject(args, f"must be a file that can be read ({reason_of(error)})")
    try:
        state = torch.load(whole, map_location="cpu", weights_only=True)
    except Exception:  # whatever torch.load makes of bytes that it did not write, an OSError, too
        state = None
    if not isinstance(state, dict) or state.get("example") != args.example:
        reject(args, f"is not a whole checkpoint of {args.example}; give another file")
    if not _finite(state):
        reject(args, "has numbers that are not finite; give another file")
    return state


def inspect(args: Namespace, make_model: Callable[[], nn.Module],
            weights: str = "model") -> dict | None:
    """Return the state to resume from, or None, before any process starts.

    A file that is not a checkpoint of this example is refused, so it is never lost. Other flags
    than those of the checkpoint (`Parser`, `args.settings`) are refused, too.

    Args:
        args: Parsed flags.
        make_model: Makes a model; a checkpoint with weights of other shapes is refused.
        weights: Name of the weights in the state.
    """
    if args.checkpoint is None or not starts_rank(args, args.checkpoint_rank):
        return None
    state = load(args) if args.resume or args.checkpoint.exists() else None
    if state and shapes(state[weights]) != shapes(make_model().state_dict()):
        reject(args, "is of another model; give the flags of that one, or another file")
    if state and args.resume:
        for name, value in state["settings"].items():
            if name in args.settings and args.settings[name] != value:
                refuse(f"{given(args, name)} must be {shortened(value)}, as in "
                       f"{given(args, 'checkpoint')}")
    return state if args.resume else None


def require_epochs(args: Namespace, behind: int) -> None:
    """Refuse fewer `--epochs` than the checkpoint already contains."""
    if args.epochs < behind:
        refuse(f"{given(args, 'epochs')} must be at least {behind}: the checkpoint already has "
               f"{behind}", args.checkpoint_rank)


def reject(args: Namespace, why: str) -> NoReturn:
    """Refuse `--checkpoint`; `why` continues the sentence."""
    refuse(f"--checkpoint {shortened(args.checkpoint)} {why}", args.checkpoint_rank)


def _finite(value: object) -> bool:
    """Return whether nested lists and dicts hold no infinite number and no NaN."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def shapes(weights: dict) -> dict:
    """Return `{name: shape}` of a state_dict."""
    return {name: getattr(tensor, "shape", None) for name, tensor in weights.items()}
