"""What the programs of this folder show: a table with a row for each way, metrics.json."""

import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator

from common import report
from common.cli import ranks_here, require_memory

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from transformer_parallel.model import Shape, Transformer
from transformer_parallel.traffic import Traffic

MB = 1e6


def require_room(args: Namespace, copies: int, mlps: int = 1, places: float = 1,
                 scores: float = 0) -> None:
    """Refuse a model and a batch that do not fit into the memory of this machine.

    Args:
        args: the parsed flags.
        copies: of the model, on all ranks together.
        mlps: in each block.
        places: for each token in these MLPs, also where they stay empty.
        scores: how many times all ranks together have T x T of them, for each head of each block;
            torch's attention has none, the oracle all.

    Raises:
        SystemExit: 2 after one line.
    """
    shape = Shape()
    # Attention has 4 units^2, an MLP 8: both with gradients and AdamW's two moments.
    weights = (4 + 8 * mlps) * shape.units**2 * args.blocks
    # A token needs 16 times its units in each block, which are kept for backward.
    of_token = ((4 + 12 * max(1, places)) * shape.units
                + (3 if args.check else scores) * shape.heads * args.seq_len) * args.blocks
    here = len(ranks_here(args))
    held = (4 * copies * weights + of_token * args.seq_len * args.batch_size) / args.world_size
    n_bytes = 4 * here * max(weights, held)  # at first, each rank makes all of the model
    flags = ("experts", "capacity_factor", "blocks", "batch_size", "seq_len")
    require_memory(args, [flag for flag in flags if flag in args], n_bytes)


def mean_of_ranks(value: torch.Tensor) -> float:
    """Return the mean of a number of each rank, as a float on every one of them."""
    mean = value.detach().clone()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


class Meter:
    """Measures the seconds of each step; counts, in the last one, what is sent and held.

    Args:
        way: has the `model`, and the `parameters()` that its `optimizer` steps.
        device: where it computes.
    """

    def __init__(self, way: object, device: torch.device) -> None:
        self.way, self.device, self.last = way, device, False
        self.seconds, self.waited, self.traffic, self.held = [], [], Traffic(), {}

    @contextlib.contextmanager
    def step(self, last: bool) -> Iterator[None]:
        """Stand around a step."""
        self.last, began = last, self.now()
        with self.traffic if last else contextlib.nullcontext():
            yield
        self.seconds.append(self.now() - began)
        if last:
            self.held["state"] = held_bytes(self.way)["state"]  # AdamW's first step makes it

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Stand around what is left when backward is over; count in front of it what is held."""
        if self.last:
            self.held = held_bytes(self.way)
        began = self.now()
        yield
        self.waited.append(self.now() - began)

    def now(self) -> float:
        """Return the time in seconds, when the device has done what it was given."""
        if self.device.type == "cuda":
            # Not all streams: nccl's work is what `waiting` is to wait for.
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def measured(self) -> dict:
        """Return all of it."""
        return {"seconds": self.seconds, "waited": self.waited, "calls": dict(self.traffic.calls),
                "sent": dict(self.traffic.sent), "held": self.held}


def held_bytes(way: object) -> dict[str, int]:
    """Count the bytes of weights, gradients and optimizer state that this rank holds now.

    Args:
        way: has the `model`, and the `parameters()` that its `optimizer` steps.

    Returns:
        `{"weights": ..., "gradients": ..., "state": ...}`. A storage counts once, whoever looks at
        it, and with what it has: that of freed weights has nothing.
    """
    parameters = [*way.model.parameters(), *way.parameters()]
    states = [value for state in way.optimizer.state.values() for value in state.values()]
    kinds = {"weights": parameters, "gradients": [parameter.grad for parameter in parameters],
             "state": [value for value in states if value.dim()]}  # not the counters of steps
    return {kind: sum(storages_of(tensors).values()) for kind, tensors in kinds.items()}


def storages_of(tensors: list[torch.Tensor | None]) -> dict[int, int]:
    """Return the bytes of each storage behind these tensors; of a DTensor, what is here."""
    here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for tensor in tensors if tensor is not None)
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in here}


class Kept(saved_tensors_hooks):
    """Counts the bytes that autograd keeps of what is computed within, besides the weights.

    Copies of weights in another type count: they are there from forward to backward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self.note, lambda tensor: tensor)
        self.model, self.storages = model, {}

    def __enter__(self) -> None:
        self.weights = {parameter.data_ptr() for parameter in self.model.parameters()}
        self.storages.clear()
        super().__enter__()

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that is kept; a storage counts once."""
        if tensor.data_ptr() not in self.weights:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def bytes(self) -> int:
        """Return how many bytes they are."""
        return sum(self.storages.values())


def rows_of(measured: dict[str, list[dict]]) -> list[dict]:
    """Make a row for each way of what its ranks have measured.

    Args:
        measured: `{way: [what train() has returned, of each rank]}`.

    Returns:
        Dicts: the losses; calls and megabytes sent in the last step by the rank that sends most;
        `held_mb` of the rank that holds most; medians of the other steps, in milliseconds.
    """
    rows = []
    for way, ranks in measured.items():
        most = max(ranks, key=lambda rank: sum(rank["sent"].values()))
        row = {"way": way, "losses": ranks[0]["losses"], "calls": most["calls"],
               "sent_mb": sum(most["sent"].values()) / MB,
               "step_ms": median_ms(ranks[0]["seconds"])}
        row["waited_ms"] = median_ms(ranks[0]["waited"])
        row["held_mb"] = {what: max(rank["held"][what] for rank in ranks) / MB
                          for what in ranks[0]["held"]}
        row["figures"] = {what: max(rank["figures"][what] for rank in ranks)
                          for what in ranks[0]["figures"]}
        rows.append(row)
    return rows


def median_ms(seconds: list[float]) -> float:
    """Return the median of the steps between the first, which warms up, and the last.

    In the last one bytes are counted. It is taken where there is none between.
    """
    return 1e3 * statistics.median(seconds[1:-1] or seconds[-1:])


def finish(metrics: dict, args: Namespace, model: Transformer | None = None) -> dict:
    """Write metrics.json, print the table and the last line; return the whole metrics."""
    rows = rows_of(metrics["measured"])
    model = model or Transformer(Shape(blocks=args.blocks))
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
    """Write a count as it is, a figure with three digits, and a dash for what is not known."""
    return "-" if figure is None else f"{figure:,}" if isinstance(figure, int) else f"{figure:.3g}"
