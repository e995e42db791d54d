"""Results of the programs of this folder: a table with a row for each variant, metrics.json."""

import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator

from common import report
from common.cli import ranks_here, require_memory

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from transformer_parallel.model import Transformer
from transformer_parallel.traffic import Traffic

MB = 1e6


def require_room(args: Namespace, copies: int, mlps: int = 1, slots: float = 1,
                 scores: float = 0) -> None:
    """Refuse a model and a batch that do not fit into the memory of this machine.

    Args:
        args: Parsed flags.
        copies: Copies of the model on all ranks together.
        mlps: MLPs of each block.
        slots: Slots for each token in these MLPs, including empty slots.
        scores: Attention scores that all ranks together hold, in units of T x T for each head of
            each block. PyTorch's attention holds none, the single process of `--check` all.

    Raises:
        SystemExit: 2 after one line.
    """
    shape = args.shape
    # Attention has 4 units^2, an MLP 8: both with gradients and AdamW's two moments.
    weights = (4 + 8 * mlps) * shape.units**2 * args.blocks
    # Each block keeps 16 times the units of a token for the backward pass.
    of_token = ((4 + 12 * max(1, slots)) * shape.units
                + (3 if args.check else scores) * shape.heads * args.seq_len) * args.blocks
    here = len(ranks_here(args))
    held = (4 * copies * weights + of_token * args.seq_len * args.batch_size) / args.world_size
    n_bytes = 4 * here * max(weights, held)  # at first, each rank makes the full model
    flags = ("experts", "capacity_factor", "blocks", "batch_size", "seq_len")
    require_memory(args, [flag for flag in flags if flag in args], n_bytes)


class Meter:
    """Seconds of each step; bytes sent and held in the last one.

    Args:
        way: Variant, with its `model`, and `parameters()` for its `optimizer`.
        device: Device of the model.
    """

    def __init__(self, way: object, device: torch.device) -> None:
        self.way, self.device, self.last = way, device, False
        self.seconds, self.waited, self.traffic, self.held = [], [], Traffic(), {}

    @contextlib.contextmanager
    def step(self, last: bool) -> Iterator[None]:
        """Time a step; count in the last one."""
        self.last, began = last, self.now()
        with self.traffic if last else contextlib.nullcontext():
            yield
        self.seconds.append(self.now() - began)
        if last:
            # Only now, because AdamW's first step makes its state.
            self.held["state"] = held_bytes(self.way)["state"]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait after the backward pass; before it, count the bytes held."""
        if self.last:
            self.held = held_bytes(self.way)
        began = self.now()
        yield
        self.waited.append(self.now() - began)

    def now(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        if self.device.type == "cuda":
            # The current stream only: `waiting` times the wait for nccl's streams.
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def measured(self) -> dict:
        """Return all measurements."""
        return {"seconds": self.seconds, "waited": self.waited, "calls": dict(self.traffic.calls),
                "sent": dict(self.traffic.sent), "held": self.held}


def held_bytes(way: object) -> dict[str, int]:
    """Count the bytes of weights, gradients and optimizer state that this rank holds now.

    A storage with several views counts once; a freed storage has 0 bytes.

    Args:
        way: Variant, with its `model`, and `parameters()` for its `optimizer`.
    """
    parameters = [*way.model.parameters(), *way.parameters()]
    states = [value for state in way.optimizer.state.values() for value in state.values()]
    kinds = {"weights": parameters, "gradients": [parameter.grad for parameter in parameters],
             "state": [value for value in states if value.dim()]}  # without the step counters
    return {kind: sum(storages_of(tensors).values()) for kind, tensors in kinds.items()}


def storages_of(tensors: list[torch.Tensor | None]) -> dict[int, int]:
    """Return the bytes of each storage of these tensors; for a DTensor, of its local part."""
    here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for tensor in tensors if tensor is not None)
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in here}


class Kept(saved_tensors_hooks):
    """Counter of the bytes that autograd keeps inside `with kept:`, without the weights.

    Copies of weights in another type count, because they stay from forward to backward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self.note, lambda tensor: tensor)
        self.model, self.storages = model, {}

    def __enter__(self) -> None:
        self.weights = {parameter.data_ptr() for parameter in self.model.parameters()}
        self.storages.clear()
        super().__enter__()

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd keeps; a storage counts once."""
        if tensor.data_ptr() not in self.weights:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def bytes(self) -> int:
        """Return the number of bytes kept."""
        return sum(self.storages.values())


def rows_of(measured: dict[str, list[dict]]) -> list[dict]:
    """Make a row for each variant from the measurements of its ranks.

    Args:
        measured: For each variant, what `train` returned on each rank.

    Returns:
        Dicts: the losses; calls and megabytes that the busiest rank sent in the last step; for each
        kind, megabytes of the rank that holds most; median milliseconds of rank 0's other steps.
    """
    rows = []
    for way, ranks in measured.items():
        most = max(ranks, key=lambda rank: sum(rank["sent"].values()))
        row = {"way": way, "losses": ranks[0]["losses"], "calls": most["calls"],
               "sent_mb": sum(most["sent"].values()) / MB,
               "step_ms": median_ms(ranks[0]["seconds"]),
               "waited_ms": median_ms(ranks[0]["waited"]),
               "held_mb": {what: max(rank["held"][what] for rank in ranks) / MB
                           for what in ranks[0]["held"]},
               "figures": {what: max(rank["figures"][what] for rank in ranks)
                           for what in ranks[0]["figures"]}}
        rows.append(row)
    return rows


def median_ms(seconds: list[float]) -> float:
    """Return the median in milliseconds, without the first step (warm-up) and the last (counting).

    With one or two steps, it is the last step's.
    """
    return 1e3 * statistics.median(seconds[1:-1] or seconds[-1:])


def finish(metrics: dict, args: Namespace, model: Transformer | None = None) -> dict:
    """Write metrics.json, print the table and the summary line; return the full metrics."""
    rows = rows_of(metrics["measured"])
    model = model or Transformer(args.shape)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    device = "cpu" if metrics["backend"] == "gloo" else None
    whole = {"parameters": n_parameters, "rows": rows}
    whole = report.save_metrics(args, whole, metrics["backend"], device)
    held, others = list(rows[0]["held_mb"]), list(dict.fromkeys(
        what for row in rows for what, figure in row["figures"].items()
        if not isinstance(figure, list)))
    waited = any(row["waited_ms"] > 1 for row in rows)
    wide = max(12, 2 + max(len(row["way"]) for row in rows))
    print(f"\n{'':{wide}}{'sent':>11}" + "".join(f"{what:>12}" for what in (*held, *others))
          + f"{'a step':>10}{'waiting' if waited else '':>{10 * waited}}{'loss':>9}")
    for row in rows:
        print(f"{row['way']:{wide}}{row['sent_mb']:8.2f} MB"
              + "".join(f"{row['held_mb'][what]:9.2f} MB" for what in held)
              + "".join(f"{short(row['figures'].get(what)):>12}" for what in others)
              + f"{row['step_ms']:7.0f} ms" + (f"{row['waited_ms']:7.0f} ms" if waited else "")
              + f"{row['losses'][-1]:9.4f}  {in_words(row['calls'])}")
    ways = ", ".join(row["way"] for row in rows)
    same = max(row["losses"][-1] for row in rows) - min(row["losses"][-1] for row in rows)
    print(f"\n{n_parameters:,} parameters on {args.world_size} ranks: the last losses of {ways} "
          f"differ by {same:.0e}")
    return whole


def in_words(calls: dict[str, int]) -> str:
    """Write counts as "52 all_reduce, 2 send"."""
    return ", ".join(f"{number} {name}" for name, number in calls.items()) or "nothing sent"


def short(figure: float | None) -> str:
    """Write an integer in full, a float with three digits, a dash for None."""
    return "-" if figure is None else f"{figure:,}" if isinstance(figure, int) else f"{figure:.3g}"
