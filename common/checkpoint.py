"""Checkpoints: written whole or not at all, read with `weights_only=True`, of the same example."""

import io
import math
from argparse import Namespace
from collections.abc import Callable, Collection
from glob import escape
from typing import NoReturn

import torch
from common.cli import starts_rank
from common.limits import given, reason_of, refuse, shortened
from common.report import replacing
from torch import nn

COUNTERS = ("epochs", "episodes", "env_steps")  # how much is behind a training


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


def load(args: Namespace, needs: Collection[str] = ()) -> dict:
    """Return the state in `args.checkpoint`, as `save` was given it, on the CPU.

    Raises:
        SystemExit: 2 after one line, if the file is missing, truncated or not a checkpoint of this
            example, if something is not in it that the example `needs`, or if a number in it is
            infinite or not a number.
    """
    try:
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        reject(args, "must be an existing file with --resume")
    except OSError as error:
        reject(args, f"must be a file that can be read ({reason_of(error)})")
    except Exception:  # whatever torch.load makes of bytes that it did not write
        state = None
    ours = isinstance(state, dict) and state.get("example") == args.example
    if (not ours or not state.keys() >= {*needs} or not _counts(state)
            or not _plain(state.get("settings", {}))):
        reject(args, f"is not a whole checkpoint of {args.example}; give another file")
    if not _finite(state):
        reject(args, "has numbers that are not finite; give another file")
    return state


def inspect(args: Namespace, needs: Collection[str] = (),
            make_model: Callable[[], nn.Module] | None = None) -> dict | None:
    """Return the state to resume from, or None, before any process starts.

    A file that is not a checkpoint is refused, and so never lost; and so are other flags than its
    own (`Parser`, `args.settings`), but for how long the training goes on.

    Args:
        args: the parsed flags.
        needs: what must be in the state.
        make_model: makes the one whose weights are under "model" in the state; those of another
            model are refused.
    """
    if args.checkpoint is None or not starts_rank(args, args.checkpoint_rank):
        return None
    state = load(args, needs) if args.resume or args.checkpoint.exists() else None
    if state and make_model and _shapes(state.get("model")) != _shapes(make_model().state_dict()):
        reject(args, "is of another model; give the flags of that one, or another file")
    if state and args.resume:
        require_settings(args, state.get("settings", {}), given(args, "checkpoint"))
    return state if args.resume else None


def require_settings(args: Namespace, settings: dict, where: str) -> None:
    """Refuse flags that are not those of the training that goes on; `where`: in words, its file."""
    for name, value in settings.items():
        if name in args.settings and args.settings[name] != value:
            refuse(f"{given(args, name)} must be {shortened(value)}, as in {where}")


def reject(args: Namespace, why: str) -> NoReturn:
    """Refuse `--checkpoint`: the sentence goes on with `why`."""
    refuse(f"--checkpoint {shortened(args.checkpoint)} {why}", args.checkpoint_rank)


def _counts(state: dict) -> bool:
    """Return whether the counters are what they can be: whole numbers, or a list of what was."""
    history = state.get("history", [])
    kept = {**state, **history} if isinstance(history, dict) else state
    counters = [kept[name] for name in COUNTERS if name in kept]
    return isinstance(history, (list, dict)) and all(
        isinstance(counter, list) or (type(counter) is int and counter >= 0)
        for counter in counters)


def _plain(settings: object) -> bool:
    """Return whether these can be the values of flags."""
    return isinstance(settings, dict) and all(
        value is None or isinstance(value, (bool, int, float, str)) for value in settings.values())


def _finite(value: object) -> bool:
    """Return whether there is no infinite number and no NaN, however deep in lists and dicts."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _shapes(weights: object) -> dict | None:
    if not isinstance(weights, dict):
        return None
    return {name: getattr(tensor, "shape", None) for name, tensor in weights.items()}
