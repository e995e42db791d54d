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

# What a program needs of its state: of each part a type, a tensor of the same shape and dtype, or
# of those in it `{name: what it needs}`, `[what each needs]`, `(what the first needs, the second)`
# where there must be so many; an int counts something. This is the state of an optimizer:
OPTIMIZER = {"state": dict, "param_groups": list}


class NotSavedError(Exception):
    """Carries what has happened, in words that go on after "rank 0 (agent) ..."."""


def save(args: Namespace, state: dict) -> None:
    """Write `state` (tensors and plain Python values) and `args.settings` to `args.checkpoint`.

    Raises:
        NotSavedError: if the disk is full, or the folder has become read-only; the file is as it
            was.
    """
    whole = io.BytesIO()  # to a file, torch.save would call a full disk "unexpected pos 576 vs 534"
    torch.save({"example": args.example, "settings": args.settings, **state}, whole)
    try:
        with replacing(args.checkpoint) as temporary:
            temporary.write_bytes(whole.getbuffer())
    except OSError as error:
        raise NotSavedError(f"could not write {args.checkpoint}: {error.strerror}") from None


def remove_leftovers(args: Namespace) -> None:
    """Remove what somebody who was killed has left of writing to `args.checkpoint`."""
    for leftover in args.checkpoint.parent.glob(f".{escape(args.checkpoint.name)}.*.tmp"):
        leftover.unlink(missing_ok=True)


def load(args: Namespace, needs: dict | None = None) -> dict:
    """Return the state in `args.checkpoint`, as `save` was given it, on the CPU.

    Raises:
        SystemExit: 2 after one line, if the file is missing, truncated or not a checkpoint of this
            example, if what the example `needs` (see above) is not in it, or is something else, or
            if a number in it is infinite or not a number.
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
    if (not _fits(state, {"example": str, "settings": dict, **(needs or {})})
            or state["example"] != args.example or not _plain(state["settings"])):
        reject(args, f"is not a whole checkpoint of {args.example}; give another file")
    if not _finite(state):
        reject(args, "has numbers that are not finite; give another file")
    return state


def inspect(args: Namespace, needs: dict,
            make_model: Callable[[], nn.Module], weights: str = "model") -> dict | None:
    """Return the state to resume from, or None, before any process starts.

    A file that is not a checkpoint is refused, and so never lost; and so are other flags than its
    own (`Parser`, `args.settings`), but for how long the training goes on.

    Args:
        args: the parsed flags.
        needs: what must be in the state (see `OPTIMIZER`), beside the weights.
        make_model: makes the one whose weights are in the state; those of another model are
            refused.
        weights: their name in the state.
    """
    if args.checkpoint is None or not starts_rank(args, args.checkpoint_rank):
        return None
    needs = {weights: dict, **needs}
    state = load(args, needs) if args.resume or args.checkpoint.exists() else None
    if state and _shapes(state[weights]) != _shapes(make_model().state_dict()):
        reject(args, "is of another model; give the flags of that one, or another file")
    if state and args.resume:
        _require_settings(args, state["settings"])
    return state if args.resume else None


def _require_settings(args: Namespace, settings: dict) -> None:
    """Refuse flags that are not those of the training that goes on."""
    for name, value in settings.items():
        if name in args.settings and args.settings[name] != value:
            refuse(f"{given(args, name)} must be {shortened(value)}, as in "
                   f"{given(args, 'checkpoint')}")


def require_epochs(args: Namespace, behind: int) -> None:
    """Refuse fewer `--epochs` than a checkpoint has behind it."""
    if args.epochs < behind:
        refuse(f"{given(args, 'epochs')} must be at least {behind}: the checkpoint has so many "
               "behind it", args.checkpoint_rank)


def reject(args: Namespace, why: str) -> NoReturn:
    """Refuse `--checkpoint`: the sentence goes on with `why`."""
    refuse(f"--checkpoint {shortened(args.checkpoint)} {why}", args.checkpoint_rank)


def _fits(value: object, needs: object) -> bool:
    """Return whether a part of a state has what a program needs of it (see `OPTIMIZER`)."""
    if isinstance(needs, dict):
        return isinstance(value, dict) and all(
            name in value and _fits(value[name], part) for name, part in needs.items())
    if isinstance(needs, list):
        return isinstance(value, list) and all(_fits(part, needs[0]) for part in value)
    if isinstance(needs, tuple):
        return (isinstance(value, list) and len(value) == len(needs)
                and all(map(_fits, value, needs)))
    if isinstance(needs, torch.Tensor):
        return (isinstance(value, torch.Tensor)
                and (value.dtype, value.shape) == (needs.dtype, needs.shape))
    if needs is int:
        return type(value) is int and value >= 0  # True is an int, too
    return isinstance(value, needs)


def _plain(settings: dict) -> bool:
    """Return whether these can be the values of flags."""
    return all(value is None or isinstance(value, (bool, int, float, str))
               for value in settings.values())


def _finite(value: object) -> bool:
    """Return whether there is no infinite number and no NaN, however deep in lists and dicts."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _shapes(weights: dict) -> dict:
    return {name: getattr(tensor, "shape", None) for name, tensor in weights.items()}
