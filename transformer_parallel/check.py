"""The oracle of this folder: one process that has the whole model and the whole batch.

Every program trains in each of its ways, in float64, in its own processes; the model is a third as
wide as theirs, which leaves a ninth of the numbers, of the same kinds. After each step, what
the ranks hold of gradients and weights is put together here, however that way has cut it, and held
against that process; what they have sent and what they keep, against formulas. The ways that
compute in bfloat16 are held in float32, see `hold_mixed_precision`.
"""

import importlib
import logging
import math
import random
import re
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from common.launch import launch
from common.oracle import Comparison, default_dtype, verdict
from common.recorder import Recorder

import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from transformer_parallel import experts, results, ring_attention
from transformer_parallel import main as data_parallel
from transformer_parallel.model import Shape, Transformer
from transformer_parallel.pipeline import Pipeline

TOLERANCE, WHY = 1e-9, "float64 sums in another order"
MIXED = ("bf16", "autocast")  # checked in float32: autocast leaves float64 as it is
IN_FLOAT32 = 1e-6, "float32 rounding, not bfloat16's"
UNITS = 48  # of the model: like its 144, they divide by 12 heads and by 2, 3 and 4 ranks
STEPS = 2  # the second one needs what the first has left: moments, vectors, what was moved
FLOAT64 = 8  # bytes
FAR_FROM_ROUNDING = 1e-10  # for two probabilities
State = dict[str, torch.Tensor]


class Routed(NamedTuple):
    """Is what the router of a block did in a step."""

    balance: torch.Tensor  # the second loss
    wanted: list[int]  # tokens of each expert
    went: list[list[int]]  # of each rank: how many of its tokens got a place at each expert
    closest: float  # the smallest difference of a token's two largest probabilities


def check(program: ModuleType, args: Namespace) -> dict[str, float] | None:
    """Print what was compared; return `{what: difference}` where it is reported, else None."""
    args.steps, args.program = min(args.steps, STEPS), program.__name__
    # Nearly twice as many buckets as of the program's model: a number has 8 bytes (4 in MIXED).
    args.bucket_kb = max(1, args.bucket_kb * UNITS**2 // Shape().units**2)
    if {*MIXED, "plain"} & {*args.ways}:
        args.device = "cpu"  # whose kernels round as the oracle, and keep what is derived
    return verdict(launch(record, args, program.role_name))


def record(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Run the program, recorded; return the findings on rank 0."""
    Shape.__new__.__defaults__ = Shape(units=UNITS)  # here, and wherever the program makes one
    torch.set_default_dtype(torch.float64)
    # It would tell on each rank how `copied` could fetch parts that are cut twice in fewer calls.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # For each way, on rank 0: of each rank, its steps: (gradients, weights). In MIXED a third is
    # there: the rank's gradients before they are averaged.
    everyone = []
    with Recorder() as recorder:
        recorder.around(ring_attention, "start_hop")(watched_hop)
        recorder.around(Pipeline, "send")(watched_send)

        @recorder.around(data_parallel, "train")
        def train(original, rank, size, make_way, args):
            steps, own = [], []
            mixed = list(dict.fromkeys(args.ways))[len(everyone)] in MIXED

            def recorded_way(model, args):
                way = make_way(model, args)
                after_step = way.after_step

                def noted():
                    gradients = held(way, "grad")  # ZeRO drops them
                    after_step()
                    steps.append((gradients, held(way, "data"), *own))
                    own.clear()

                def noting_own(finish=way.finish_gradients):
                    own.append(held(way, "grad"))
                    finish()

                way.after_step = noted
                way.finish_gradients = noting_own if mixed else way.finish_gradients
                watch_costs(way)
                return way

            torch.manual_seed(rank)  # nothing may depend on what was drawn before
            with default_dtype(torch.float32 if mixed else torch.float64):
                measured = original(rank, size, recorded_way, args)
            everyone.append(on_rank_0(steps))
            return measured

        result = importlib.import_module(args.program).run_worker(rank, world_size, args)
    return compare(everyone, result["measured"], args) if rank == 0 else None


def on_rank_0(steps: list[tuple[State, State]]) -> list[list[tuple[State, State]]] | None:
    """Return what all ranks pass, on rank 0; None elsewhere: it may be a gigabyte."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(steps, everyone)
    return everyone


class Hop:
    """Is a message of the ring, or of a pipeline, until somebody has waited for it."""

    on_its_way = []

    def __init__(self, request: dist.Work) -> None:
        self.request = request
        self.on_its_way.append(self)

    def wait(self) -> None:
        """Wait for it."""
        self.request.wait()
        self.on_its_way.remove(self)


def watched_hop(start_hop: Callable, *tensors: torch.Tensor) -> list[Hop]:
    """Start a hop of the ring; whoever computes meanwhile is counted in `watch_costs`."""
    return [Hop(request) for request in start_hop(*tensors)]


def watched_send(send: Callable, *message: Any) -> Hop:
    """Send to another stage; a message that nobody waits for is counted in `watch_costs`."""
    return Hop(send(*message))


def watch_costs(way: object) -> None:
    """Add to a way's figures what only shows while it runs.

    "weights held at most": where ZeRO gathers units, the bytes after each gathering.
    "gradients held at most": where it scatters them, the bytes before each scattering.
    "gradients behind a bucket": how many backward finds while a bucket is on its way.
    "order of gradients": the names, as backward has found them in the last step, for DDP.
    "hops behind attention": of the ring, in the last step, in which a rank computes meanwhile.
    "losses": how many were computed in the last step, one for each backward.
    "never waited for": messages that were still on their way at the end of a step, at most.
    """
    most, counted, behind, losses, order, hops = {}, way.figures, [], [], [], []

    def note(what, number):
        most[what] = max(number, most.get(what, 0))

    def noting_weights(gather):
        def gather_and_note():
            gather()
            weights = [*way.model.parameters(), *way.parameters()]
            note("weights held at most", sum(results.storages_of(weights).values()))
        return gather_and_note

    def noting_gradients(scatter_or_finish):
        def note_and_go_on():
            gradients = [parameter.grad for parameter in (*way.model.parameters(),
                                                          *way.parameters())]
            note("gradients held at most", sum(results.storages_of(gradients).values()))
            scatter_or_finish()
        return note_and_go_on

    def noting_overlap(finish):
        def note_and_finish():
            note("gradients behind a bucket", len(behind))
            behind.clear()
            finish()
        return note_and_finish

    for unit in getattr(way, "units", []):
        note("weights held at most", 0)
        unit.gather_weights = noting_weights(unit.gather_weights)
        unit.scatter_gradients = noting_gradients(unit.scatter_gradients)
    if hasattr(way, "units"):
        way.finish_gradients = noting_gradients(way.finish_gradients)
    if hasattr(way, "works"):
        way.finish_gradients = noting_overlap(way.finish_gradients)
        for parameter in way.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: behind.extend(way.works[:1]))
    if isinstance(way, data_parallel.TorchDDP):
        for name, parameter in way.model.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    if isinstance(way, ring_attention.Ring):
        def noting_hop(owner, pairs=way.pairs):
            hops.extend([owner] if Hop.on_its_way else [])
            return pairs(owner)

        way.pairs = noting_hop

    def noting_loss(*piece, loss=way.loss):
        losses.append(piece)
        return loss(*piece)

    def noting_step(*batch, forward_backward=way.forward_backward):
        for of_last_step in (losses, order, hops):
            of_last_step.clear()
        loss = forward_backward(*batch)
        note("never waited for", len(Hop.on_its_way))
        return loss

    way.loss, way.forward_backward = noting_loss, noting_step
    way.figures = lambda: {**counted(), **most, "losses": len(losses), "order of gradients": order,
                           "hops behind attention": len(hops)}


def held(way: object, what: str) -> State:
    """Copy what this rank holds, by name: of its parameters, or of the parts that ZeRO has cut.

    Args:
        way: of the program.
        what: "grad" or "data".
    """
    named = {re.sub(r"^(module|\d+)\.", "", name): parameter
             for name, parameter in way.model.named_parameters()}
    units = getattr(way, "units", [])
    # zero3's parts have memory of their own: what may be left in the whole is of the step before.
    sharded = [storage_of(unit.part) != storage_of(unit.whole) for unit in units]
    if units and (what == "grad" or any(sharded)):
        named = {f"unit {number}": unit.part for number, unit in enumerate(units)}
    return {name: copied(getattr(parameter, what)) for name, parameter in named.items()}


def storage_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins."""
    return tensor.untyped_storage().data_ptr()


def copied(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU; a DTensor with what the other ranks have of it."""
    with _disable_current_modes():  # the program has not sent this
        value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().cpu().clone()


def compare(everyone: list[list[list[tuple[State, State]]]], measured: dict[str, list[dict]],
            args: Namespace) -> dict:
    """Hold what all ranks have recorded, and what is reported, against one process."""
    findings = Comparison(f"{args.world_size} processes")
    losses, *oracle, routers = single_process(args)
    for (way, reported), of_ranks in zip(measured.items(), everyone, strict=True):
        for rank in reported:
            if rank["losses"] != reported[0]["losses"]:
                findings.holds(f"{way}, losses", False, "they differ between ranks")
        if way in MIXED:
            with default_dtype(torch.float32):
                hold_mixed_precision(findings, way, reported, of_ranks, args)
        else:
            for what, (name, states) in enumerate(zip(("gradients", "weights"), oracle,
                                                      strict=True)):
                steps = [[rank[step][what] for rank in of_ranks] for step in range(args.steps)]
                pairs = [together(step, whole) for step, whole in zip(steps, states, strict=True)]
                findings.close(f"{way}, {name}", *zip(*pairs, strict=True), TOLERANCE, WHY,
                               scale_at_least=1e-6)
            findings.close(f"{way}, losses", reported[0]["losses"], losses, TOLERANCE, WHY)
        hold_costs(findings, way, reported, args, routers[-1])
    if {"ring", "zigzag"} & measured.keys():
        findings.close("softmax of large scores", *large_scores(), TOLERANCE, WHY, unit="order")
    if routers[-1]:
        closest = min(router.closest for step in routers for router in step)
        findings.holds("choices", closest > FAR_FROM_ROUNDING,
                       f"the two most probable experts of a token differ by {closest:.0e} at least:"
                       " no rounding moves a token to another one")
    return findings.as_dict()


def together(states: list[State], whole: State) -> tuple[State, State]:
    """Put together what the ranks hold; return it, and what one process has in the same form.

    A tensor that a rank has whole is held as a copy of its own. What is smaller was cut along the
    first dimension that is: the parts are side by side, in the order of the ranks. If fewer parts
    than there are ranks make the whole, the next ranks have a copy of it.

    Args:
        states: of each rank.
        whole: of one process.
    """
    if any(name.startswith("unit") for name in states[0]):
        units = {}
        for name, tensor in whole.items():
            units.setdefault(re.match(r"blocks\.\d+|\w+", name)[0], []).append(tensor.flatten())
        whole = {f"unit {number}": torch.cat(unit) for number, unit in enumerate(units.values())}
        states = [{name: torch.cat([state[name] for state in states])[: len(whole[name])]
                   for name in states[0]}]
    ours, theirs = {}, {}
    for name, tensor in whole.items():
        found = [state[name] for state in states if name in state]
        if found and found[0].shape != tensor.shape:
            cut = next(dim for dim in range(tensor.dim())
                       if found[0].shape[dim] != tensor.shape[dim])
            n = math.ceil(tensor.shape[cut] / found[0].shape[cut])
            found = [torch.cat(found[first:first + n], cut) for first in range(0, len(found), n)]
        ours[name], theirs[name] = found, [tensor] * max(1, len(found))
    return ours, theirs


def large_scores() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Attend piece by piece to keys whose exp(score) overflows; and to all of them at once.

    The scores of a small model do not overflow: what a softmax takes off would not be missed.

    Returns:
        The outputs, both ways: of keys whose scores grow, and of the same keys in reverse order.
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


def whole_model(args: Namespace) -> Transformer:
    """Make the model as it is before the first step."""
    torch.manual_seed(args.seed)
    model = Transformer(Shape(blocks=args.blocks))
    return experts.with_experts(model, args) if hasattr(args, "experts") else model


def single_process(args: Namespace,
                   ) -> tuple[list[float], list[State], list[State], list[list[Routed]]]:
    """Train alone, on whole batches.

    Returns:
        The losses, gradients and weights of each step, and what the routers did in it.
    """
    weights = {name: parameter.detach().clone().requires_grad_()
               for name, parameter in whole_model(args).named_parameters()}
    optimizer = optim.AdamW(weights.values(), lr=args.lr)
    losses, gradients, states, routers = [], [], [], []
    for step in range(args.steps):
        tokens = characters(step, args)
        optimizer.zero_grad()
        routed = []
        logits = forward(weights, tokens[:, :-1], args, routed)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss + sum(args.balance * router.balance for router in routed)
        loss.backward()
        losses.append(loss.item())
        routers.append(routed)
        gradients.append({name: weight.grad.clone() for name, weight in weights.items()})
        optimizer.step()
        states.append({name: weight.detach().clone() for name, weight in weights.items()})
    return losses, gradients, states, routers


def forward(weights: State, tokens: torch.Tensor, args: Namespace, routed: list) -> torch.Tensor:
    """Compute the logits of the whole model, with attention written out.

    Args:
        weights: by their names.
        tokens: (rows, length).
        args: the parsed flags.
        routed: what each router does is appended, see `of_experts`.
    """
    shape, length = Shape(), tokens.shape[1]
    x = embedded(weights, tokens)
    later = torch.full((length, length), -math.inf).triu(1)

    def layer(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(x, name):
        return F.layer_norm(x, (shape.units,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    for number in range(sum(name.endswith("norm1.weight") for name in weights)):
        block = f"blocks.{number}"
        h = norm(x, f"{block}.norm1")
        q, k, v = (layer(h, f"{block}.attention.{name}").unflatten(-1, (shape.heads, -1))
                   for name in ("query", "key", "value"))
        scores = torch.einsum("nihd,njhd->nhij", q, k) / math.sqrt(shape.units / shape.heads)
        mixed = torch.einsum("nhij,njhd->nihd", (scores + later).softmax(-1), v)
        x = x + layer(mixed.flatten(2), f"{block}.attention.out")
        h = norm(x, f"{block}.norm2")
        if f"{block}.mlp.router.weight" in weights:
            x = x + of_experts(h, f"{block}.mlp", layer, args, routed)
        else:
            x = x + of_mlp(h, f"{block}.mlp", layer)
    return layer(norm(x, "norm"), "head")


def embedded(weights: State, tokens: torch.Tensor) -> torch.Tensor:
    """Look up the tokens (rows, length), and add sines and cosines of their places."""
    units = Shape().units
    angles = torch.arange(tokens.shape[1])[:, None] * torch.exp(
        torch.arange(0, units, 2) * (-math.log(10_000) / units))
    return weights["embedding.weight"][tokens] + torch.cat([angles.sin(), angles.cos()], dim=1)


def of_mlp(h: torch.Tensor, name: str, layer: Callable) -> torch.Tensor:
    """Compute an MLP, with gelu written out."""
    h = layer(h, f"{name}.up")
    return layer(h * (1 + torch.erf(h / math.sqrt(2))) / 2, f"{name}.down")


def of_experts(h: torch.Tensor, name: str, layer: Callable, args: Namespace, routed: list,
               ) -> torch.Tensor:
    """Compute a mixture of experts, one token after the other of each rank's rows.

    The capacity is that of a rank, so the rows are cut as the ranks cut them. A token whose two
    best experts differ by less than rounding could be sent elsewhere; `compare` holds that none do.

    Args:
        h: (rows, length, units).
        name: of the layer.
        layer: `layer(x, name)` computes a linear one.
        args: the parsed flags.
        routed: to this is appended what the router did.
    """
    outputs, balance, counts, went, closest = [], 0, [0] * args.experts, [], 1.0
    for rows in h.chunk(args.world_size):
        tokens = rows.flatten(0, 1)
        probabilities = layer(tokens, f"{name}.router").softmax(-1)
        places = [capacity_of(len(tokens), args)] * args.experts
        wants, kept = probabilities.argmax(1).tolist(), [[] for _ in range(args.experts)]
        for token, expert in enumerate(wants):
            if places[expert]:
                places[expert] -= 1
                kept[expert].append(token)
        output = torch.zeros_like(tokens)
        for expert, of_expert in enumerate(kept):
            found = of_mlp(tokens[of_expert], f"{name}.experts.{expert}", layer)
            output = output.index_add(0, torch.tensor(of_expert, dtype=torch.long),
                                      found * probabilities[of_expert, expert, None])
            share = wants.count(expert) / len(wants)
            balance = balance + args.experts * share * probabilities[:, expert].mean()
            counts[expert] += wants.count(expert)
        went.append([len(of_expert) for of_expert in kept])
        best = probabilities.sort(1).values[:, -2:]
        closest = min(closest, (best[:, 1] - best[:, 0]).min().item())
        outputs.append(output.view_as(rows))
    routed.append(Routed(balance / args.world_size, counts, went, closest))
    return torch.cat(outputs)


def capacity_of(tokens: int, args: Namespace) -> int:
    """Compute how many of so many tokens an expert takes."""
    return math.ceil(min(args.capacity_factor * tokens / args.experts, tokens))


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


def hold_mixed_precision(findings: Comparison, way: str, reported: list[dict],
                         of_ranks: list[list[tuple[State, State, State]]], args: Namespace) -> None:
    """Hold what is rounded to bfloat16, and that all else is as exact as float32.

    From one beginning, two trainings would part: where a gradient is all rounding, AdamW makes as
    large a step of it as of any other. So each step begins with what the run had before it.

    Args:
        findings: to these is added.
        way: its name.
        reported: what each rank has measured.
        of_ranks: of each rank, its steps: averaged gradients, weights, its own gradients.
        args: the parsed flags.
    """
    n, steps = args.world_size, [list(ranks) for ranks in zip(*of_ranks, strict=True)]
    averaged, weights, own = ([[rank[what] for rank in ranks] for ranks in steps]
                              for what in range(3))
    first = {name: parameter.detach() for name, parameter in whole_model(args).named_parameters()}
    before = [first, *(ranks[0] for ranks in weights[:-1])]
    batches = [characters(step, args) for step in range(args.steps)]
    in_bf16 = [[gradients_of(state, rows, lambda *batch: forward_in_bf16(*batch, way))
                for rows in batch.chunk(n)] for state, batch in zip(before, batches, strict=True)]
    with default_dtype(torch.float64):
        exact = [gradients_of(as_float64(state), batch, lambda *batch: forward(*batch, args, []))
                 for state, batch in zip(before, batches, strict=True)]
    means = [{name: sum(rank[name].double() for rank in ranks) / n for name in first}
             for ranks in own]
    stepped = adamw_steps(before, [ranks[0] for ranks in averaged], args)

    findings.close(f"{way}, a rank's gradients", own, [[of_rows for _, of_rows in ranks]
                                                       for ranks in in_bf16], 1e-4,
                   "the same casts in the same kernels: none rounds to the other side")
    findings.close(f"{way}, their mean", averaged, [[mean] * n for mean in means], *IN_FLOAT32)
    findings.close(f"{way}, AdamW's step", weights, [[step] * n for step in stepped], *IN_FLOAT32)
    findings.close(f"{way}, losses", reported[0]["losses"],
                   [sum(loss for loss, _ in ranks) / n for ranks in in_bf16], *IN_FLOAT32)
    findings.close(f"{way}, gradients", averaged, [[whole] * n for _, whole in exact], 0.05,
                   "float64's; bfloat16 rounds to 0.2%, many times", scale_at_least=1e-3)


def adamw_steps(before: list[State], gradients: list[State], args: Namespace) -> list[State]:
    """Step once from each of these weights, in float64, with these gradients; return all weights.

    The moments go on from step to step.
    """
    weights = as_float64(before[0])
    optimizer = optim.AdamW(weights.values(), lr=args.lr)
    states = []
    for state, of_state in zip(before, gradients, strict=True):
        for name, weight in weights.items():
            weight.data, weight.grad = state[name].double(), of_state[name].double()
        optimizer.step()
        states.append({name: weight.clone() for name, weight in weights.items()})
    return states


def as_float64(state: State) -> State:
    """Copy tensors, in float64."""
    return {name: tensor.to(torch.float64, copy=True) for name, tensor in state.items()}


def gradients_of(weights: State, tokens: torch.Tensor, forward: Callable) -> tuple[float, State]:
    """Compute the loss and the gradients of some rows.

    Args:
        weights: by their names.
        tokens: (rows, length + 1).
        forward: `forward(weights, tokens)` computes the logits.
    """
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    loss = F.cross_entropy(forward(weights, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


def forward_in_bf16(weights: State, tokens: torch.Tensor, way: str) -> torch.Tensor:
    """Compute the logits, with attention and MLPs in bfloat16.

    The kernels are torch's, as in the model, and so are the shapes. Else some sums would round to
    the other side, which soon changes gradients by one step of bfloat16 (2^-7 of a number), and so
    does a cast at the wrong place.

    Args:
        weights: by their names.
        tokens: (rows, length).
        way: "bf16" casts what attention is given once; "autocast" for query, key and value each, so
            that their gradients are added in float32.
    """
    shape, x = Shape(), embedded(weights, tokens)

    def norm(x, name):
        return F.layer_norm(x, (shape.units,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    for number in range(sum(name.endswith("norm1.weight") for name in weights)):
        def layer(h, name, block=f"blocks.{number}"):
            return F.linear(h.bfloat16(), weights[f"{block}.{name}.weight"].bfloat16(),
                            weights[f"{block}.{name}.bias"].bfloat16())

        h = norm(x, f"blocks.{number}.norm1")
        h = h.bfloat16() if way == "bf16" else h
        q, k, v = (layer(h, f"attention.{name}").unflatten(-1, (shape.heads, -1)).transpose(1, 2)
                   for name in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + layer(mixed.transpose(1, 2).flatten(2), "attention.out")
        h = norm(x, f"blocks.{number}.norm2")
        x = x + layer(F.gelu(layer(h, "mlp.up")), "mlp.down")
    return F.linear(norm(x, "norm"), weights["head.weight"])


def hold_costs(findings: Comparison, way: str, reported: list[dict], args: Namespace,
               routed: list[Routed]) -> None:
    """Hold what the ranks have sent in a step, and what they hold, against the formulas."""
    n, sizes = args.world_size, {name: parameter.shape for name, parameter in
                                 whole_model(args).named_parameters()}
    if routed:
        wanted = [router.wanted for router in routed]
        went = sum(sum(of_rank) for router in routed for of_rank in router.went)
        for what, value in (("dropped", sum(map(sum, wanted)) - went),
                            ("fullest", max(map(max, wanted))),
                            ("emptiest", min(map(min, wanted))), ("tokens", wanted)):
            findings.equal(f"{way}, {what}", [rank["figures"][what] for rank in reported],
                           [value] * n, "of the last step", unit="rank")
    if args.program == data_parallel.__name__:
        findings.equal(f"{way}, backwards", [rank["figures"]["losses"] for rank in reported],
                       [args.accumulate] * n, "of --accumulate, in the last step")
    if way == "ddp":  # which fills its buckets in the order in which backward came to them
        order = reported[0]["figures"]["order of gradients"]
        sizes = {name: sizes[name] for name in reversed(order)}
    expected = (mixtures(routed) if routed else FORMULAS)[way](args, n, sizes)
    counted = {"calls": [rank["calls"] for rank in reported],
               "bytes sent": [sum(rank["sent"].values()) for rank in reported],
               **{f"{what} held": [rank["held"][what] for rank in reported]
                  for what in ("weights", "gradients", "state")},
               **{what: [rank["figures"][what] for rank in reported]
                  for what in expected if what in reported[0]["figures"]}}
    for what, of_ranks in expected.items():
        of_ranks = of_ranks if isinstance(of_ranks, list) else [of_ranks] * n
        findings.close(f"{way}, {what}", counted[what], of_ranks, 1e-12, "counted, derived",
                       unit="rank")


# Each formula below gives the costs of a way: calls, bytes, figures. What is a list is of one rank
# after the other; what is none is the same on all of them.


def replicas(args: Namespace, n: int, sizes: dict[str, torch.Size], calls: int | None = None,
             ) -> dict:
    """Compute the costs where every rank has all: 2 P (n-1)/n are sent, P, P and 2 P held.

    Args:
        args: the parsed flags.
        n: how many ranks there are.
        sizes: of the parameters, by their names.
        calls: of all_reduce; by default, one for each gradient.
    """
    p = FLOAT64 * sum(map(math.prod, sizes.values()))
    return {"calls": {"all_reduce": calls or len(sizes)}, "bytes sent": 2 * p * (n - 1) / n,
            "weights held": p, "gradients held": p, "state held": 2 * p}


def buckets(args: Namespace, n: int, sizes: dict[str, torch.Size]) -> dict:
    """Compute the same in buckets, of which each is full with what makes it long enough."""
    return replicas(args, n, sizes, len(in_buckets(args, sizes)))


def overlap(args: Namespace, n: int, sizes: dict[str, torch.Size]) -> dict:
    """Compute the same, where the first bucket leaves with its last gradient."""
    behind = len(sizes) - in_buckets(args, sizes)[0] + 1
    return {**buckets(args, n, sizes), "gradients behind a bucket": behind}


def ddp(args: Namespace, n: int, sizes: dict[str, torch.Size]) -> dict:
    """Compute the same; DDP cuts its buckets after the first step, which has a single one."""
    return buckets(args, n, sizes) if args.steps > 1 else replicas(args, n, sizes, calls=1)


def in_buckets(args: Namespace, sizes: dict[str, torch.Size]) -> list[int]:
    """Count the gradients of each bucket."""
    counts, held = [0], 0
    for size in reversed(sizes.values()):
        if held >= args.bucket_kb * 1000:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += FLOAT64 * math.prod(size)
    return counts


def zero(stage: int) -> Callable[..., dict]:
    """Return the formula of a stage of ZeRO; each unit is padded to parts of the same length."""
    def formula(args, n, sizes):
        units = {}
        for name, size in sizes.items():
            unit = re.match(r"blocks\.\d+|\w+", name)[0]
            units[unit] = units.get(unit, 0) + math.prod(size)
        whole = FLOAT64 * sum(units.values())
        parts = [FLOAT64 * math.ceil(unit / n) for unit in units.values()]
        part = sum(parts)
        padded = n * part
        gathers = 2 if stage == 3 else 1
        # Backward comes to the last unit first: of those behind it there are parts, of it all.
        peaks = [FLOAT64 * unit + sum(parts[number + 1:])
                 for number, unit in enumerate(units.values())]
        return {"calls": {"all_gather": gathers * len(units), "reduce_scatter": len(units)},
                "bytes sent": (1 + gathers) * part * (n - 1),
                "weights held": part if stage == 3 else padded,
                "weights held at most": part + n * max(parts) if stage == 3 else padded,
                "gradients held": whole if stage == 1 else part,
                "gradients held at most": whole if stage == 1 else max(peaks),
                "state held": 2 * part}
    return formula


def fsdp(gathers: int) -> Callable[..., dict]:
    """Return the formula of `fully_shard`, which pads each parameter to as many rows.

    Args:
        gathers: of the weights, in a step.
    """
    def formula(args, n, sizes):
        part = FLOAT64 * sum(math.ceil(size[0] / n) * math.prod(size[1:])
                             for size in sizes.values())
        units = len({re.match(r"blocks\.\d+|\w+", name)[0] for name in sizes})
        # Without the padding: of 3 rows, 2 ranks step 2 and 1.
        stepped = [FLOAT64 * sum(max(0, min(rows := math.ceil(size[0] / n), size[0] - rank * rows))
                                 * math.prod(size[1:]) for size in sizes.values())
                   for rank in range(n)]
        return {"calls": {"all_gather": gathers * units, "reduce_scatter": units},
                "bytes sent": (1 + gathers) * part * (n - 1), "weights held": part,
                "gradients held": part, "state held": [2 * of_rank for of_rank in stepped]}
    return formula


def tensor(sequence: bool, torchs: bool = False) -> Callable[..., dict]:
    """Return the formula of tensor parallelism; with `sequence`, an all-reduce is two halves.

    Of torch's, what DTensor's operators send by themselves is not counted: for the loss, and for
    the gradients of norms. It keeps the gradient of the embedding whole.
    """
    def formula(args, n, sizes):
        ring = (n - 1) / n
        tokens = FLOAT64 * args.batch_size * args.seq_len
        activations = tokens * Shape().units
        passes = 4 * args.blocks + 2  # two each in a block, forward and backward; embedding, head
        calls = ({"all_gather": passes, "reduce_scatter": passes} if sequence else
                 {"all_reduce": passes})
        sent, whole_gradients = passes * activations, 0
        replicated = {name: size for name, size in sizes.items() if is_replicated(name)}
        held = FLOAT64 * sum(math.prod(size) / (1 if name in replicated else n)
                             for name, size in sizes.items())
        if torchs:
            whole_gradients = FLOAT64 * math.prod(sizes["embedding.weight"]) * ring
        else:  # the loss: maximum, sum, target
            calls["all_reduce"] = calls.get("all_reduce", 0) + 3
            sent += 3 * tokens
            if sequence:
                calls["all_reduce"] += len(replicated)
                sent += FLOAT64 * sum(map(math.prod, replicated.values()))
        # In units of a block's input: norms need theirs (2), and two numbers of each token; query,
        # key and value, and up, what enters them (2), which is whole. The rest is cut: query, key,
        # value, what attention found (4) and of each head the sum of a softmax; the MLP's (8).
        norms = 2 * Shape().units + 2 * 2
        kept = (2 * Shape().units + (12 * Shape().units + Shape().heads) / n
                + (norms / n if sequence else norms)) * tokens * args.blocks
        return {"calls": calls, "bytes sent": 2 * ring * sent, "weights held": held,
                "gradients held": held + whole_gradients, "state held": 2 * held,
                **({} if torchs else {"MB kept": kept / 1e6})}
    return formula


def is_replicated(name: str) -> bool:
    """Return whether a parameter is on all ranks whole: of a block two norms and two biases."""
    return "norm" in name or name.endswith(("out.bias", "down.bias"))


def grid(args: Namespace, n: int, sizes: dict[str, torch.Size]) -> dict:
    """Compute the costs of tensor parallelism inside of rows, and of averages along columns."""
    rows = n // args.row
    of_row = Namespace(**{**vars(args), "batch_size": args.batch_size // rows})
    costs = tensor(False)(of_row, args.row, sizes)
    return {**costs, "calls": {"all_reduce": costs["calls"]["all_reduce"] + len(sizes)},
            "bytes sent": costs["bytes sent"] + 2 * costs["gradients held"] * (rows - 1) / rows}


def grid_by_torch(moved: bool) -> Callable[..., dict]:
    """Return the formula of torch's grid: tensor parallelism in rows, `fully_shard` in columns.

    What is around the blocks is gathered once: the outermost `fully_shard` keeps it for backward.

    Args:
        moved: to a mesh of a single column.
    """
    def formula(args, n, sizes):
        row = 1 if moved and args.steps > 1 else args.row
        columns = n // row
        of_row = Namespace(**{**vars(args), "batch_size": args.batch_size // columns})
        local = {}
        for name, size in sizes.items():
            by_inputs = name.endswith(("out.weight", "down.weight"))
            cut = [1 if is_replicated(name) else row, 1][::-1 if by_inputs else 1]
            local[name] = torch.Size(rows // n for rows, n in zip(size, cut, strict=False))
        blocks = {name: size for name, size in local.items() if name.startswith("blocks.")}
        around = {name: size for name, size in local.items() if name not in blocks}
        costs, again = fsdp(2)(args, columns, blocks), fsdp(1)(args, columns, around)
        sums = tensor(False, torchs=True)(of_row, row, sizes)
        along = {"all_gather": 2 * args.blocks + 1, "reduce_scatter": args.blocks + 1}
        return {"calls": (along if columns > 1 else {}) | (sums["calls"] if row > 1 else {}),
                "bytes sent": sums["bytes sent"] + costs["bytes sent"] + again["bytes sent"],
                **{f"{what} held": costs[f"{what} held"] + again[f"{what} held"]
                   for what in ("weights", "gradients")},
                "state held": [sum(of_both) for of_both in
                               zip(costs["state held"], again["state held"], strict=True)
                               for _ in range(row)]}
    return formula


def numbers_of_stages(args: Namespace, stages: int,
                      sizes: dict[str, torch.Size]) -> list[list[int]]:
    """Count, for each of so many stages, the numbers of each of its parameters."""
    counts = []
    for stage, blocks in enumerate(torch.arange(args.blocks).tensor_split(stages)):
        units = {f"blocks.{number}" for number in blocks.tolist()}
        units |= {"embedding"} if stage == 0 else set()
        units |= {"norm", "head"} if stage == stages - 1 else set()
        counts.append([math.prod(size) for name, size in sizes.items()
                       if re.match(r"blocks\.\d+|\w+", name)[0] in units])
    return counts


def grid_of_stages(args: Namespace, n: int, sizes: dict[str, torch.Size]) -> dict:
    """Compute the costs of a pipeline in each row, and of averages along columns."""
    rows = n // args.row
    of_row = Namespace(**{**vars(args), "batch_size": args.batch_size // rows})
    costs = pipeline(1, one_f_one_b)(of_row, args.row, sizes)
    averaged = [2 * p * (rows - 1) / rows for p in costs["gradients held"]]
    costs["bytes sent"] = [sum(pair) for pair in zip(costs["bytes sent"], averaged, strict=True)]
    costs["calls"] = [{**calls, "all_reduce": len(mine)} for calls, mine in
                      zip(costs["calls"], numbers_of_stages(args, args.row, sizes), strict=True)]
    return {what: of_row if what == "bubble" else of_row * rows for what, of_row in costs.items()}


def pipeline(stages: int, in_flight: Callable[[int, int, int], int] | None,
             ) -> Callable[..., dict]:
    """Return the formula of a pipeline with so many stages on each rank.

    Args:
        stages: of a rank.
        in_flight: `in_flight(rank, ranks, micro_batches)`: how many a rank holds; None for torch's,
            which does not tell.
    """
    def formula(args, n, sizes):
        m, of_stages = args.micro_batches, numbers_of_stages(args, stages * n, sizes)
        activations = FLOAT64 * args.batch_size * args.seq_len * Shape().units
        # Each stage of a rank sends a batch on, and its gradients back; but the first stage sends
        # none back, and the last one none on.
        batches = [2 * stages - (rank == 0) - (rank == n - 1) for rank in range(n)]
        p = [FLOAT64 * sum(map(sum, of_stages[rank::n])) for rank in range(n)]
        told = in_flight and {"in flight": [in_flight(rank, n, m) for rank in range(n)],
                              "bubble": (n - 1) / (stages * m + n - 1), "never waited for": 0}
        return {"calls": [{"send": m * number} if number else {} for number in batches],
                "bytes sent": [activations * number for number in batches],
                "weights held": p, "gradients held": p,
                "state held": [2 * of_rank for of_rank in p], **(told or {})}
    return formula


def one_f_one_b(rank: int, n: int, m: int) -> int:
    """Return how many micro-batches a rank holds until its first backward."""
    return min(n - rank, m)


def context(way: str) -> Callable[..., dict]:
    """Return the formula of context parallelism: gradients in buckets, and K and V of each block.

    K and V of a rank are b bytes. `gather` fetches n - 1 times as many, and scatters as many of
    their gradients; in a ring they go n - 1 hops in forward and in backward, their gradients n.
    A hop of `torch_ring` is an all-to-all in which each rank has something for one other.
    """
    def formula(args, n, sizes):
        b = 2 * FLOAT64 * args.batch_size * args.seq_len // n * Shape().units
        once = args.blocks * b
        costs = buckets(args, n, sizes)
        if way == "gather":
            calls = {"all_gather": args.blocks, "reduce_scatter": args.blocks}
            sent, held, scores, hops = 2 * (n - 1) * once, n * b, 1 / n, 0
        else:
            calls = {"all_to_all" if way == "torch_ring" else "send": args.blocks * (3 * n - 2)}
            sent, held = (3 * n - 2) * once, min(n, 3) * b
            # Of n pieces, a rank looks at its own and those in front; of 2 n, at 2 n + 1 pairs.
            scores = [(rank + 1) / n**2 if way == "ring" else (2 * n + 1) / (2 * n) ** 2
                      for rank in range(n)]
            hops = 2 * args.blocks * (n - 1)  # of K and V, forward and backward
        told = {"MB of K, V": held / 1e6, "scores": scores, "hops behind attention": hops}
        return costs | {"calls": costs["calls"] | calls, "bytes sent": costs["bytes sent"] + sent,
                        **({} if way == "torch_ring" else told)}
    return formula


def mixtures(routed: list[Routed]) -> dict[str, Callable[..., dict]]:
    """Return the formulas of experts: averaged gradients of the others, four exchanges in a block.

    Args:
        routed: what the routers did: `uneven` sends what has a place, and before it the counts.
    """
    def sharded(uneven):
        def formula(args, n, sizes):
            shared = {name: size for name, size in sizes.items() if ".experts." not in name}
            of_experts = FLOAT64 * sum(math.prod(sizes[name])
                                       for name in sizes.keys() - shared.keys()) / n
            capacity = capacity_of(args.batch_size // n * args.seq_len, args)
            rows = 2 * args.blocks * args.experts * capacity * (n - 1) / n  # in a forward
            counts = 8 * args.blocks * args.experts * (n - 1) / n if uneven else 0
            rows = [sum(leaving(router, rank, n) for router in routed) if uneven else rows
                    for rank in range(n)]
            costs = buckets(args, n, shared)
            costs["calls"]["all_to_all"] = (5 if uneven else 4) * args.blocks
            sent = costs.pop("bytes sent")
            return {"calls": costs.pop("calls"),
                    "bytes sent": [sent + counts + 2 * of_rank * FLOAT64 * Shape().units
                                   for of_rank in rows],
                    **{what: held + (2 if what == "state held" else 1) * of_experts
                       for what, held in costs.items()}}
        return formula

    return {"replicas": buckets, "experts": sharded(False), "uneven": sharded(True),
            "functional": sharded(False)}


def leaving(router: Routed, rank: int, n: int) -> int:
    """Count the rows that leave a rank in a forward: its tokens, and those that it sends back."""
    return sum(count for source, of_rank in enumerate(router.went)
               for expert, count in enumerate(of_rank)
               if (source == rank) != (expert * n // len(of_rank) == rank))


def recomputing(forwards: int) -> Callable[..., dict]:
    """Return the formula of activation checkpointing: an input of each group of blocks is kept.

    Without it, 16 inputs of each block are, and what norms and attention need besides: mean and
    deviation of two norms, and of each head the sum of a softmax.
    """
    def formula(args, n, sizes):
        tokens = args.batch_size // n * args.seq_len
        kept = (math.ceil(args.blocks / args.every) * Shape().units if forwards == 2 else
                args.blocks * (16 * Shape().units + 2 * 2 + Shape().heads))
        return buckets(args, n, sizes) | {"forwards": forwards,
                                          "MB kept": FLOAT64 * tokens * kept / 1e6}
    return formula


def in_bfloat16(inputs: int) -> Callable[..., dict]:
    """Return the formula of a way whose attention and MLPs compute in bfloat16.

    Args:
        inputs: how many times its input, in bfloat16, a block keeps.
    """
    def formula(args, n, sizes):
        # Whose float32 is half of what the other formulas count, also of what fills a bucket.
        costs = buckets(Namespace(**{**vars(args), "bucket_kb": 2 * args.bucket_kb}), n, sizes)
        halves = {what: cost / 2 for what, cost in costs.items() if what != "calls"}
        # In float32: mean and deviation of two norms, and of each head the sum of a softmax.
        of_token = 2 * inputs * Shape().units + 4 * (2 * 2 + Shape().heads)
        copies = 2 * sum(math.prod(size) for name, size in sizes.items()
                         if re.search(r"(attention|mlp)\..*weight", name))
        kept = args.batch_size // n * args.seq_len * of_token * args.blocks + copies
        return costs | halves | {"forwards": 1, "MB kept": kept / 1e6}
    return formula


FORMULAS = {
    "each": replicas, "replicas": replicas, "buckets": buckets, "overlap": overlap, "ddp": ddp,
    "zero1": zero(1), "zero2": zero(2), "zero3": zero(3), "fsdp_zero2": fsdp(1), "fsdp": fsdp(2),
    "tensor": tensor(False), "dtensor": tensor(False, torchs=True),
    "sequence": tensor(True), "dtensor_sequence": tensor(True, torchs=True),
    "data": replicas, "data_tensor": grid, "data_pipeline": grid_of_stages,
    "torch": grid_by_torch(moved=False), "moved": grid_by_torch(moved=True),
    **{way: context(way) for way in ring_attention.WAYS},
    "plain": recomputing(1), "recompute": recomputing(2), "checkpoint": recomputing(2),
    # The norms' inputs stay in float32 (4), and are kept in bfloat16, too, for what follows (2);
    # query, key, value, what attention found (4), in the MLP four times the units, twice (8).
    # `autocast` keeps one norm's output three times, for query, key and value.
    "bf16": in_bfloat16(18), "autocast": in_bfloat16(20),
    "gpipe": pipeline(1, lambda rank, n, m: m), "1f1b": pipeline(1, one_f_one_b),
    "interleaved": pipeline(2, lambda rank, n, m: min(2 * m, 3 * n - 1 - 2 * rank)),
    "torch_gpipe": pipeline(1, None), "torch_1f1b": pipeline(1, None),
    "torch_interleaved": pipeline(2, None), "pipeline": pipeline(1, one_f_one_b),
}
