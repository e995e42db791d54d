"""Compare every program of this folder with one process that has the full model and batch.

The programs train each variant in float64, in their own processes. Their model is a third as wide
as usual; this leaves a ninth of the numbers, of the same kinds. After each step, the shards that
the ranks hold of gradients and weights are joined here and compared with that process. The bytes
that a written-out variant sends and holds are compared with formulas. The variants that compute in
bfloat16 are compared in float32, see `hold_mixed_precision`.
"""

import importlib
import logging
import math
import random
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from common.launch import launch
from common.oracle import Comparison, default_dtype, verdict
from common.recorder import Recorder

import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from transformer_parallel import experts, results, ring_attention, tensor_parallel, zero
from transformer_parallel import main as data_parallel
from transformer_parallel.main import Way
from transformer_parallel.model import Transformer, unit_of
from transformer_parallel.pipeline import Pipeline

TOLERANCE, WHY = 1e-9, "float64 sums in another order"
MIXED = ("bf16", "autocast")  # checked in float32: autocast leaves float64 as it is
IN_FLOAT32 = 1e-6, "float32 rounding, not bfloat16's"
UNITS = 48  # of the model: like its 144, they divide by 12 heads and by 2, 3 and 4 ranks
STEPS = 2  # the second step needs what the first one left: moments, vectors, moved weights
State = dict[str, torch.Tensor]


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` on the reporting process."""
    args.steps, args.program = min(args.steps, STEPS), program.__name__
    # Nearly twice as many buckets as usual: a number has 8 bytes (4 in MIXED).
    args.bucket_kb = max(1, args.bucket_kb * UNITS**2 // args.shape.units**2)
    args.shape = args.shape._replace(units=UNITS)
    if {*MIXED, "plain"} & {*args.ways}:
        args.device = "cpu"  # its kernels round as here, and keep the activations derived below
    return verdict(launch(record, args, program.role_name))


# --- the single process


class Routed(NamedTuple):
    """The choices of a block's router in a step."""

    balance: torch.Tensor  # the second loss
    wanted: list[int]  # tokens of each expert
    went: list[list[int]]  # for each rank: number of its tokens with a slot at each expert


def full_model(args: Namespace) -> Transformer:
    """Make the model as it is before the first step."""
    torch.manual_seed(args.seed)
    model = Transformer(args.shape)
    return experts.with_experts(model, args) if hasattr(args, "experts") else model


def single_process(args: Namespace,
                   ) -> tuple[list[float], list[State], list[State], list[Routed]]:
    """Train alone, on full batches.

    Returns:
        Losses, gradients and weights of each step, and what the routers did in the last one.
    """
    weights = dict(full_model(args).named_parameters())
    optimizer = optim.AdamW(weights.values(), lr=args.lr)
    losses, gradients, states = [], [], []
    for step in range(args.steps):
        routed = []
        loss, gradient = loss_and_gradients(weights, characters(step, args), args, routed)
        for name, weight in weights.items():
            weight.grad = gradient[name].clone()
        optimizer.step()
        losses.append(loss)
        gradients.append(gradient)
        states.append({name: weight.detach().clone() for name, weight in weights.items()})
    return losses, gradients, states, routed


def loss_and_gradients(weights: State, tokens: torch.Tensor, args: Namespace,
                       routed: list[Routed], casts: str = "") -> tuple[float, State]:
    """Compute the loss of some rows (rows, length + 1), and its gradients; see `forward`."""
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    logits = forward(weights, tokens[:, :-1], args, routed, casts)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss = loss + sum(args.balance * router.balance for router in routed)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


def forward(weights: State, tokens: torch.Tensor, args: Namespace, routed: list[Routed],
            casts: str = "") -> torch.Tensor:
    """Compute the logits of the full model for tokens (rows, length); see `of_experts`.

    With `casts`, attention and MLPs compute in bfloat16. "bf16" casts the input of attention once;
    "autocast" casts it for query, key and value each, so their gradients are added in float32.
    """
    shape, length = args.shape, tokens.shape[1]
    angles = torch.arange(length)[:, None] * torch.exp(
        torch.arange(0, shape.units, 2) * (-math.log(10_000) / shape.units))
    x = weights["embedding.weight"][tokens] + torch.cat([angles.sin(), angles.cos()], dim=1)
    later = torch.full((length, length), -math.inf).triu(1)

    def layer(x, name):
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        if casts and name.startswith("blocks."):
            x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
        return F.linear(x, weight, bias)

    def norm(x, name):
        return F.layer_norm(x, (shape.units,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def attend(q, k, v):
        if casts:  # the model's kernel, because another one rounds some sums to the other side
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (q @ k.mT / math.sqrt(shape.units / shape.heads) + later).softmax(-1) @ v

    for number in range(shape.blocks):
        block = f"blocks.{number}"
        h = norm(x, f"{block}.norm1")
        h = h.bfloat16() if casts == "bf16" else h
        q, k, v = (layer(h, f"{block}.attention.{name}").unflatten(-1, (shape.heads, -1))
                   .transpose(1, 2) for name in ("query", "key", "value"))
        x = x + layer(attend(q, k, v).transpose(1, 2).flatten(2), f"{block}.attention.out")
        h = norm(x, f"{block}.norm2")
        of_tokens = of_experts if f"{block}.mlp.router.weight" in weights else of_mlp
        x = x + of_tokens(h, f"{block}.mlp", layer, args, routed)
    return layer(norm(x, "norm"), "head")


def of_mlp(h: torch.Tensor, name: str, layer: Callable, *_: object) -> torch.Tensor:
    """Compute an MLP."""
    return layer(F.gelu(layer(h, f"{name}.up")), f"{name}.down")


def of_experts(h: torch.Tensor, name: str, layer: Callable, args: Namespace,
               routed: list[Routed]) -> torch.Tensor:
    """Compute a mixture of experts (rows, length, units), one token after the other.

    Each rank has a capacity of its own, so the rows are split as the ranks split them.
    """
    outputs, balance, counts, went = [], 0, Counter(), []
    for rows in h.chunk(args.world_size):
        tokens = rows.flatten(0, 1)
        probabilities = layer(tokens, f"{name}.router").softmax(-1)
        kept = [[] for _ in range(args.experts)]
        capacity = math.ceil(min(args.capacity_factor * len(tokens) / args.experts, len(tokens)))
        wants = probabilities.argmax(1).tolist()
        for token, expert in enumerate(wants):
            if len(kept[expert]) < capacity:
                kept[expert].append(token)
        output = torch.zeros_like(tokens)
        for expert, of_expert in enumerate(kept):
            found = of_mlp(tokens[of_expert], f"{name}.experts.{expert}", layer)
            output = output.index_add(0, torch.tensor(of_expert, dtype=torch.long),
                                      found * probabilities[of_expert, expert, None])
            share = wants.count(expert) / len(wants)
            balance = balance + args.experts * share * probabilities[:, expert].mean()
        counts.update(wants)
        went.append([len(of_expert) for of_expert in kept])
        outputs.append(output.view_as(rows))
    wanted = [counts[expert] for expert in range(args.experts)]
    routed.append(Routed(balance / args.world_size, wanted, went))
    return torch.cat(outputs)


def characters(step: int, args: Namespace) -> torch.Tensor:
    """Make the batch of a step: (batch_size, seq_len + 1)."""
    draw, rows = random.Random(f"{args.seed} {step}"), []
    for _ in range(args.batch_size):
        skipped, text = draw.randrange(6), ""
        while len(text) < skipped + args.seq_len + 1:
            a, b = draw.randrange(100), draw.randrange(100)
            text += f"{a}+{b}={a + b}\n"
        rows.append([95 if letter == "\n" else ord(letter) - 32
                     for letter in text[skipped : skipped + args.seq_len + 1]])
    return torch.tensor(rows)


# --- what is recorded


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; return the findings on rank 0."""
    # DTensor would print how `joined` could gather tensors with two splits in fewer calls.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    everyone = []  # on rank 0, for each variant and rank: the states of each step
    with Recorder() as recorder:
        watch = Watch(recorder)

        @recorder.around(data_parallel, "train")
        def train(original, rank, size, make_way, args):
            mixed = list(dict.fromkeys(args.ways))[len(everyone)] in MIXED
            steps, of_ranks = [], [None] * size if rank == 0 else None
            torch.manual_seed(rank)  # the run may not depend on earlier random numbers
            with default_dtype(torch.float32 if mixed else torch.float64):
                measured = original(rank, size, recorded(make_way, watch, steps, mixed), args)
            dist.gather_object(steps, of_ranks)  # to rank 0 only: it may be a gigabyte
            everyone.append(of_ranks)
            return measured

        result = importlib.import_module(args.program).run_worker(rank, world_size, args)
    if rank != 0:
        return None
    with default_dtype(torch.float64):
        return compare(everyone, result["measured"], args)


def recorded(make_way: type[Way], watch: "Watch", steps: list[dict[str, State]],
             mixed: bool) -> type[Way]:
    """Return a subclass of a variant that appends its states to `steps`.

    A step's states are the `gradients` before the optimizer's step, the `weights` after it and,
    with `mixed`, the rank's `own` gradients before they are averaged.
    """
    class Recorded(make_way):
        def __init__(self, model, args):
            super().__init__(model, args)
            watch.begin(self)

        def finish_gradients(self):
            self.states = {"own": held(self, "grad")} if mixed else {}
            super().finish_gradients()

        def after_step(self):
            self.states["gradients"] = held(self, "grad")  # ZeRO drops them
            super().after_step()
            watch.end_step()

        def reported(self, loss):
            self.states["weights"] = held(self, "data")
            steps.append({what: joined(state) for what, state in self.states.items()})
            return super().reported(loss)

        def figures(self):
            return super().figures() | watch.figures

    return Recorded


def held(way: Way, what: str) -> State:
    """Copy the "grad" or the "data" of this rank's parameters, or of ZeRO's shards, by name."""
    named = {re.sub(r"^(module|\d+)\.", "", name): parameter
             for name, parameter in way.model.named_parameters()}
    units = getattr(way, "units", [])
    # The shards of zero3 have memory of their own; `whole` may hold weights of the step before.
    sharded = [unit.part.untyped_storage().data_ptr() != unit.whole.untyped_storage().data_ptr()
               for unit in units]
    if units and (what == "grad" or any(sharded)):
        named = {f"unit {number}": unit.part for number, unit in enumerate(units)}
    return {name: getattr(parameter, what).detach().clone() for name, parameter in named.items()}


def joined(state: State) -> State:
    """Copy tensors to the CPU, and DTensors together with the other ranks' parts of them."""
    return {name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
            for name, tensor in state.items()}


class Message:
    """A message of a ring or a pipeline; it counts as on its way until the rank has waited."""

    def __init__(self, request: dist.Work, on_its_way: list["Message"]) -> None:
        self.request, self.on_its_way = request, on_its_way
        on_its_way.append(self)

    def wait(self) -> None:
        """Wait for the message."""
        self.request.wait()
        self.on_its_way.remove(self)


class Watch:
    """Numbers that only show while a variant runs.

    Attributes:
        figures: Largest bytes of a unit's weights and gradients in ZeRO; of the last step, the
            `losses` computed, the gradients computed while a bucket is on its way, the hops of a
            ring during attention, the gradients that the backward of tensor_parallel.py's `Copy`
            has changed in place, and the messages that the rank did not wait for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.way, self.figures, self.step, self.on_its_way = None, {}, Counter(), []

        @recorder.around(zero.Unit, "gather_weights")
        def gather_weights(original, unit):
            original(unit)
            self.note_held("weights")

        @recorder.around(zero.Unit, "scatter_gradients")
        def scatter_gradients(original, unit):
            self.note_held("gradients")
            original(unit)

        @recorder.around(data_parallel.Overlap, "one_is_there")
        def one_is_there(original, way, number):
            original(way, number)
            self.step["gradients behind a bucket"] += bool(way.works)

        @recorder.around(Way, "loss")
        def loss(original, way, *piece):
            self.step["losses"] += 1
            return original(way, *piece)

        @recorder.around(tensor_parallel.Copy, "backward")
        def backward(original, ctx, gradient):
            before = gradient.clone()
            result = original(ctx, gradient)
            self.step["gradients changed"] += not torch.equal(gradient, before)
            return result

        @recorder.around(ring_attention, "start_hop")
        def start_hop(original, *tensors):
            return [Message(request, self.on_its_way) for request in original(*tensors)]

        @recorder.around(ring_attention.Ring, "pairs")
        def pairs(original, way, owner):
            self.step["hops behind attention"] += bool(self.on_its_way)
            return original(way, owner)

        @recorder.around(Pipeline, "send")
        def send(original, *message):
            return Message(original(*message), self.on_its_way)

    def begin(self, way: Way) -> None:
        """Begin with a variant."""
        self.way, self.figures = way, {"never waited for": 0}
        self.on_its_way.clear()

    def note_held(self, kind: str) -> None:
        """Note the bytes that the rank holds now, if they are the most so far."""
        what = f"{kind} held at most"
        self.figures[what] = max(results.held_bytes(self.way)[kind], self.figures.get(what, 0))

    def end_step(self) -> None:
        """Keep the numbers of a step until the next one ends."""
        never = max(self.figures["never waited for"], len(self.on_its_way))
        self.figures |= {**self.step, "never waited for": never}
        self.step.clear()


# --- what is compared


def compare(everyone: list[list[list[dict[str, State]]]], measured: dict[str, list[dict]],
            args: Namespace) -> dict:
    """Compare what all ranks recorded, and the reported numbers, with one process."""
    findings = Comparison(f"{args.world_size} processes")
    losses, gradients, weights, routed = single_process(args)
    for (way, reported), of_ranks in zip(measured.items(), everyone, strict=True):
        if way in MIXED:
            with default_dtype(torch.float32):
                hold_mixed_precision(findings, way, reported, of_ranks, args)
        else:
            for what, states in (("gradients", gradients), ("weights", weights)):
                steps = [[rank[step][what] for rank in of_ranks] for step in range(args.steps)]
                pairs = [together(step, whole) for step, whole in zip(steps, states, strict=True)]
                findings.close(f"{way}, {what}", *zip(*pairs, strict=True), TOLERANCE, WHY,
                               scale_at_least=1e-6)
            findings.close(f"{way}, losses", [rank["losses"] for rank in reported],
                           [losses] * args.world_size, TOLERANCE, WHY, unit="rank")
        hold_costs(findings, way, reported, args, routed)
    if {"ring", "zigzag"} & measured.keys():
        findings.close("softmax of large scores", *large_scores(), TOLERANCE, WHY, unit="order")
    return findings.as_dict()


def together(states: list[State], whole: State) -> tuple[State, State]:
    """Join what the ranks hold; return it, and the single process's tensors in the same form.

    A tensor that a rank holds in full is compared as a copy of its own. A smaller one was split
    along the first dimension that is smaller: the parts follow each other in the order of the
    ranks. If fewer parts than there are ranks make a full tensor, the next ranks hold a copy of it.
    """
    if any(name.startswith("unit") for name in states[0]):
        units = {}
        for name, tensor in whole.items():
            units.setdefault(unit_of(name), []).append(tensor.flatten())
        whole = {f"unit {number}": torch.cat(unit) for number, unit in enumerate(units.values())}
        states = [{name: torch.cat([state[name] for state in states])[: len(whole[name])]
                   for name in states[0]}]
    ours, theirs = {}, {}
    for name, tensor in whole.items():
        found = [state[name] for state in states if name in state]
        if found and found[0].shape != tensor.shape:
            split = next(dim for dim in range(tensor.dim())
                         if found[0].shape[dim] != tensor.shape[dim])
            n = math.ceil(tensor.shape[split] / found[0].shape[split])
            found = [torch.cat(found[first:first + n], split)
                     for first in range(0, len(found), n)]
        ours[name], theirs[name] = found, [tensor] * max(1, len(found))
    return ours, theirs


def large_scores() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Attend to keys whose exp(score) overflows: in pieces, and to all keys at once.

    The scores of a small model do not overflow, so training alone would not show a softmax that
    forgets to subtract the largest score.

    Returns:
        Outputs in pieces, and outputs at once: for growing scores, and for falling scores.
    """
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 12, generator=draw) + 1000 * torch.arange(-1, 2).repeat_interleave(4)
    values = torch.randn(12, 3, generator=draw)
    merged, whole = [], []
    for order in (torch.arange(12), torch.arange(12).flip(0)):
        sums = ring_attention.nothing(values[:5])
        for keys in order.chunk(3):
            sums = ring_attention.merged(sums, scores[:, keys], values[keys])
        merged.append(sums[2] / sums[1])
        whole.append(scores.softmax(-1) @ values)
    return merged, whole


def hold_mixed_precision(findings: Comparison, way: str, reported: list[dict],
                         of_ranks: list[list[dict[str, State]]], args: Namespace) -> None:
    """Compare what is rounded to bfloat16; require float32's precision of all the rest.

    Two runs from one beginning would drift apart: if a gradient is only rounding, AdamW makes a
    step of it that is as large as any other. So each step here begins with the run's own weights.
    """
    n, steps = args.world_size, [list(ranks) for ranks in zip(*of_ranks, strict=True)]
    averaged, weights, own = ([[rank[what] for rank in ranks] for ranks in steps]
                              for what in ("gradients", "weights", "own"))
    first = {name: parameter.detach() for name, parameter in full_model(args).named_parameters()}
    before = [first, *(ranks[0] for ranks in weights[:-1])]
    batches = [characters(step, args) for step in range(args.steps)]
    in_bf16 = [[loss_and_gradients(state, rows, args, [], casts=way) for rows in batch.chunk(n)]
               for state, batch in zip(before, batches, strict=True)]
    means = [{name: sum(rank[name].double() for rank in ranks) / n for name in first}
             for ranks in own]
    updated = adamw_steps(before, [ranks[0] for ranks in averaged], args)

    findings.close(f"{way}, a rank's gradients", own, [[of_rows for _, of_rows in ranks]
                                                       for ranks in in_bf16], 1e-4,
                   "the same casts in the same kernels: no sum rounds to the other side")
    findings.close(f"{way}, their mean", averaged, [[mean] * n for mean in means], *IN_FLOAT32)
    findings.close(f"{way}, AdamW's step", weights, [[step] * n for step in updated], *IN_FLOAT32)
    losses = [sum(loss for loss, _ in ranks) / n for ranks in in_bf16]
    findings.close(f"{way}, losses", [rank["losses"] for rank in reported], [losses] * n,
                   *IN_FLOAT32, unit="rank")


def adamw_steps(before: list[State], gradients: list[State], args: Namespace) -> list[State]:
    """Return the weights after one float64 AdamW step each; the moments carry over."""
    weights = {name: tensor.double() for name, tensor in before[0].items()}
    optimizer = optim.AdamW(weights.values(), lr=args.lr)
    states = []
    for state, of_state in zip(before, gradients, strict=True):
        for name, weight in weights.items():
            weight.data, weight.grad = state[name].double(), of_state[name].double()
        optimizer.step()
        states.append({name: weight.clone() for name, weight in weights.items()})
    return states


def hold_costs(findings: Comparison, way: str, reported: list[dict], args: Namespace,
               routed: list[Routed]) -> None:
    """Compare what the ranks sent in a step, and what they hold, with the program's formulas."""
    program = importlib.import_module(args.program)

    def equal(what, expected, because, counted=None):
        counted = counted or [rank["figures"].get(what, 0) for rank in reported]
        expected = expected if isinstance(expected, list) else [expected] * args.world_size
        findings.close(f"{way}, {what}", counted, expected, 1e-12, because, unit="rank")

    if routed:
        wanted = [router.wanted for router in routed]
        went = sum(sum(of_rank) for router in routed for of_rank in router.went)
        for what, value in (("dropped", sum(map(sum, wanted)) - went),
                            ("fullest", max(map(max, wanted))),
                            ("emptiest", min(map(min, wanted))), ("tokens", wanted)):
            equal(what, [value] * args.world_size, "of the last step")
    if args.program == data_parallel.__name__:
        equal("backwards", args.accumulate, "of --accumulate, in the last step",
              [rank["figures"]["losses"] for rank in reported])
    if any("gradients changed" in rank["figures"] for rank in reported):
        equal("gradients changed", 0, "autograd may use them elsewhere")
    if way not in program.COSTS:  # PyTorch's built-in version
        return
    with default_dtype(torch.float32 if way in MIXED else torch.float64):
        weights = dict(full_model(args).named_parameters())
    went = [[router.went for router in routed]] if routed else []
    for what, expected in program.COSTS[way](args, args.world_size, weights, *went).items():
        counted = {"calls": [rank["calls"] for rank in reported],
                   "bytes sent": [sum(rank["sent"].values()) for rank in reported],
                   **{f"{kind} held": [rank["held"][kind] for rank in reported]
                      for kind in ("weights", "gradients", "state")}}
        equal(what, expected, "counted, derived", counted.get(what))
