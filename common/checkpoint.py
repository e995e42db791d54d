"""Checkpoints: written whole or not at all, read with `weights_only=True`, and only those of the same example."""

import torch
from common.cli import refuse, starts_rank
from common.report import replacing


def save(args, state):
    """Write `state` (tensors and plain Python values) to `args.checkpoint`."""
    with replacing(args.checkpoint) as temporary:
        torch.save({"example": args.example, **state}, temporary)


def load(args):
    """The state in `args.checkpoint`, as `save` was given it, on the CPU.

    Raises:
        SystemExit: 2 after one line, if the file is missing, truncated or not a checkpoint of this example.
    """
    try:
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        refuse("--checkpoint", args.checkpoint, "an existing file with --resume", args.checkpoint_rank)
    except Exception:  # whatever torch.load makes of bytes that it did not write
        state = None
    if not isinstance(state, dict) or state.get("example") != args.example:
        refuse("--checkpoint", args.checkpoint, f"a whole checkpoint of {args.example}: this file is something else",
               args.checkpoint_rank)
    return state


def inspect(args, model=None):
    """Before any process starts: the state to resume from, or None; never lose a file that is not a checkpoint.

    Args:
        args: the parsed flags.
        model: whose weights are under "model" in the state; a checkpoint of another model is refused.
    """
    if args.checkpoint is None or not starts_rank(args, args.checkpoint_rank):
        return None
    state = load(args) if args.resume or args.checkpoint.exists() else None
    if state and model and _shapes(state.get("model", {})) != _shapes(model.state_dict()):
        refuse("--checkpoint", args.checkpoint, "a checkpoint of this very model: in this one the shapes differ",
               args.checkpoint_rank)
    return state if args.resume else None


def _shapes(weights):
    return {name: tensor.shape for name, tensor in weights.items()}
