r"""Pipeline parallelism: each rank has some blocks; micro-batches pass through all of them.

Stage s is on rank s % ranks. A rank is idle while it waits for the stage before it (in backward,
for the stage after it): the bubble. The order of a rank's computations decides how long the bubble
is, and how many micro-batches the rank holds:

    --ways        order of a rank                      bubble              held at most
    gpipe         all forward, then all backward       (n-1) / (m+n-1)     m
    1f1b          backward as soon as possible         the same            n - rank
    interleaved   two short stages instead of one      (n-1) / (2m+n-1)    3n - 1 - 2 rank, each in
                                                                           one of its two stages
    torch_gpipe, torch_1f1b, torch_interleaved: the same, by torch.distributed.pipelining

Here n is the number of ranks, and m the number of micro-batches. A backward pass takes twice as
long as a forward pass. Ranks that share cores show no bubble in their seconds, so the program
computes the bubble from the orders.

    1f1b, 3 ranks, 4 micro-batches
    rank 0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1      F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
    rank 2         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

`train` of main.py calls `forward_backward`, which computes all actions of a step.

    python transformer_parallel/pipeline.py                 on four ranks
    python transformer_parallel/pipeline.py --builtin       and PyTorch's built-in versions
    python transformer_parallel/pipeline.py --micro_batches 4
    python transformer_parallel/pipeline.py --check         compare with a single process

Sources: Huang et al., "GPipe", https://arxiv.org/abs/1811.06965; Harlap et al., "PipeDream",
https://arxiv.org/abs/1806.03377, for 1F1B without an end of each step; Narayanan et al.,
https://arxiv.org/abs/2104.04473, for 1F1B with such an end, and for `interleaved`.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from common.cli import Parser, bounded, refuse
from common.program import role_name, run_program

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from transformer_parallel import main as data_parallel
from transformer_parallel import results
from transformer_parallel.main import Way, Weights, bytes_of
from transformer_parallel.model import Transformer, embed, loss_of, unit_of


class Action(NamedTuple):
    """One computation of a rank: "F" or "B" of a micro-batch, in one of the rank's stages."""

    kind: str
    micro: int
    stage: int


def gpipe(rank: int, n: int, m: int) -> list[Action]:
    """Return the order of a rank: all forward passes, then all backward passes."""
    return [*(Action("F", i, rank) for i in range(m)), *(Action("B", i, rank) for i in range(m))]


def one_f_one_b(rank: int, n: int, m: int) -> list[Action]:
    """Return the order of a rank: after its first backward, it alternates forward and backward."""
    forwards = [Action("F", i, rank) for i in range(m)]
    backwards = [Action("B", i, rank) for i in range(m)]
    return in_turns(forwards, backwards, n - rank - 1)


def interleaved(rank: int, n: int, m: int) -> list[Action]:
    """Return the order of a rank with two stages: n micro-batches in one, then in the other."""
    def of(number, first, second):
        group, within = divmod(number, 2 * n)
        return group * n + within % n, first if within < n else second

    forwards = [Action("F", *of(number, rank, rank + n)) for number in range(2 * m)]
    backwards = [Action("B", *of(number, rank + n, rank)) for number in range(2 * m)]
    return in_turns(forwards, backwards, 2 * (n - rank - 1) + n)


def in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Mix two lists: first `ahead` of `forwards`, then one of each, then the last `backwards`."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead:]


class Stage(nn.Module):
    """Some blocks; the first stage also has the embedding, the last one the norm and the head."""

    def __init__(self, model: Transformer, number: int, of: int) -> None:
        super().__init__()
        mine = torch.arange(len(model.blocks)).tensor_split(of)[number].tolist()
        # Under their names in the model: a checkpoint of all stages is one of the model.
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in mine})
        self.embedding = model.embedding if number == 0 else None
        self.norm, self.head = (model.norm, model.head) if number == of - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the blocks from tokens (B, T), or from the output of the stage before."""
        x = x if self.embedding is None else embed(self.embedding, x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Pipeline(Way):
    """GPipe: this rank's actions, in the order of a schedule.

    Every rank has the full batch: the first stage reads the tokens, the last one the targets.
    """

    schedule, stages_of_rank = staticmethod(gpipe), 1

    def __init__(self, model: Transformer, args: Namespace,
                 group: dist.ProcessGroup | None = None) -> None:
        self.n, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.m = group, args.micro_batches
        self.width = model.embedding.embedding_dim
        self.last = self.n * self.stages_of_rank - 1  # the number of the last stage
        self.stages = nn.ModuleDict({str(stage): Stage(model, stage, self.last + 1)
                                     for stage in range(self.rank, self.last + 1, self.n)})
        super().__init__(self.stages, args)
        self.order, self.in_flight = self.schedule(self.rank, self.n, self.m), 0

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the full batch."""
        return whole

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute all actions; return the loss on the rank of the last stage, 0 on other ranks."""
        self.tokens, self.targets = tokens.chunk(self.m), targets.chunk(self.m)
        self.held = {}  # {(stage, micro): (input, output, request that sends the output)}
        self.returning = []  # [(request, gradient)]: keeps tensors alive while they are sent
        self.total = torch.zeros((), device=tokens.device)
        for kind, micro, stage in self.order:
            (self.forward if kind == "F" else self.backward)(stage, micro)
            self.in_flight = max(self.in_flight, len(self.held))
        for request, _ in self.returning:
            request.wait()
        return self.total

    def forward(self, stage: int, micro: int) -> None:
        """Compute a micro-batch in a stage, and send it on."""
        x = self.tokens[micro] if stage == 0 else self.receive(micro, stage - 1).requires_grad_()
        y, sent = self.stages[str(stage)](x), None
        if stage == self.last:
            y = loss_of(y, self.targets[micro]) / self.m
            self.total += y.detach()
        else:
            sent = self.send(y.detach(), stage + 1)
        self.held[stage, micro] = x, y, sent

    def backward(self, stage: int, micro: int) -> None:
        """Run the backward pass of a stage, and send the gradient of its input back."""
        x, y, sent = self.held.pop((stage, micro))
        y.backward(None if stage == self.last else self.receive(micro, stage + 1))
        if sent is not None:
            sent.wait()  # returns at once, because the gradient of this output has arrived
        if stage > 0:
            self.returning.append((self.send(x.grad, stage - 1), x.grad))

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Send without waiting, because the other rank may be sending, too."""
        # No tag: in each schedule, a rank receives messages in the order in which they were sent.
        # With nccl, a send may wait until it is received. Then gradients, which travel the other
        # way, need a group of their own. nccl has buffers for messages as short as these.
        return dist.isend(tensor, group=self.group, group_dst=to % self.n)

    def receive(self, micro: int, source: int) -> torch.Tensor:
        """Wait for the activations, or their gradient, from another stage."""
        rows, length = self.tokens[micro].shape
        x = torch.empty(rows, length, self.width, device=self.tokens[0].device)
        dist.recv(x, group=self.group, group_src=source % self.n)
        return x

    def reported(self, loss: torch.Tensor) -> float:
        """Return the loss, which only one rank knows, on all ranks."""
        return data_parallel.mean_of_ranks(loss * self.n)

    def figures(self) -> dict[str, float]:
        """Return the largest number of micro-batches that this rank held, and the bubble."""
        return {"in flight": self.in_flight,
                "bubble": bubble([self.schedule(rank, self.n, self.m) for rank in range(self.n)])}


class OneFOneB(Pipeline):
    """1F1B: each backward pass as soon as possible, so the rank holds fewer micro-batches."""

    schedule = staticmethod(one_f_one_b)


class Interleaved(Pipeline):
    """Two short stages on each rank, so the first micro-batch reaches the last stage earlier."""

    schedule, stages_of_rank = staticmethod(interleaved), 2


class TorchGPipe(Pipeline):
    """PyTorch's GPipe, from torch.distributed.pipelining."""

    torch_schedule_class = ScheduleGPipe

    def __init__(self, model: Transformer, args: Namespace) -> None:
        super().__init__(model, args)
        device = next(self.stages.parameters()).device
        stages = [PipelineStage(stage, int(number), self.last + 1, device)
                  for number, stage in self.stages.items()]
        self.torch_schedule = self.torch_schedule_class(
            stages if len(stages) > 1 else stages[0], self.m, loss_fn=loss_of)

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Let PyTorch run the schedule: tokens go to the first stage, targets to the last."""
        losses, first = [], [tokens.contiguous()] if self.rank == 0 else []  # as torch 2.11 needs
        self.torch_schedule.step(*first, target=targets, losses=losses)
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=tokens.device)
        return loss.detach()

    def figures(self) -> dict[str, float]:
        """Return nothing: PyTorch does not report these numbers."""
        return {}


class Torch1F1B(TorchGPipe):
    """PyTorch's 1F1B."""

    torch_schedule_class = Schedule1F1B


class TorchInterleaved(TorchGPipe):
    """PyTorch's interleaved 1F1B."""

    torch_schedule_class, stages_of_rank = ScheduleInterleaved1F1B, 2


WAYS = {"gpipe": Pipeline, "1f1b": OneFOneB, "interleaved": Interleaved,
        "torch_gpipe": TorchGPipe, "torch_1f1b": Torch1F1B, "torch_interleaved": TorchInterleaved}
# {variant: PyTorch's built-in version of it}
BUILTIN = {way: f"torch_{way}" for way in ("gpipe", "1f1b", "interleaved")}


def bubble(orders: list[list[Action]]) -> float:
    """Return the fraction of time in which a rank is idle, if only computations take time.

    Args:
        orders: Actions of each rank, in order. F takes 1 unit of time, B takes 2.
    """
    ends, clocks, todo = {}, [0] * len(orders), [iter(order) for order in orders]
    last = max(action.stage for order in orders for action in order)
    waiting = {rank: next(actions) for rank, actions in enumerate(todo)}
    while waiting:
        for rank, action in [*waiting.items()]:
            needed = needed_by(action, last)
            if needed is not None and needed not in ends:
                continue
            start = max(clocks[rank], ends.get(needed, 0))
            ends[action] = clocks[rank] = start + (1 if action.kind == "F" else 2)
            if (then := next(todo[rank], None)) is None:
                del waiting[rank]
            else:
                waiting[rank] = then
    busy = sum(1 if action.kind == "F" else 2 for action in orders[0])
    return 1 - busy / max(clocks)


def needed_by(action: Action, last: int) -> Action | None:
    """Return the action that must end before this one begins; None for a first forward."""
    kind, micro, stage = action
    if kind == "F":
        return Action("F", micro, stage - 1) if stage > 0 else None
    return Action("B", micro, stage + 1) if stage < last else Action("F", micro, last)


def costs_of_stages(stages: int, in_flight: Callable[[int, int, int], int]) -> Callable[..., dict]:
    """Return what derives the costs of a pipeline; see `costs_of_each` of main.py.

    Args:
        stages: Number of stages on each rank.
        in_flight: `in_flight(rank, n, m)`, the number of micro-batches that a rank holds.
    """
    def costs(args: Namespace, n: int, weights: Weights) -> dict:
        m, item = args.micro_batches, next(iter(weights.values())).itemsize
        activations = item * args.batch_size * args.seq_len * args.shape.units
        of_stages = weights_of_stages(args, stages * n, weights)
        held = [sum(map(bytes_of, of_stages[rank::n])) for rank in range(n)]
        # Each stage of a rank sends a batch on, and its gradients back; but the first stage sends
        # no gradients, and the last stage no batch.
        batches = [2 * stages - (rank == 0) - (rank == n - 1) for rank in range(n)]
        return {"calls": [{"send": m * number} if number else {} for number in batches],
                "bytes sent": [activations * number for number in batches],
                "weights held": held, "gradients held": held,
                "state held": [2 * of_rank for of_rank in held],
                "in flight": [in_flight(rank, n, m) for rank in range(n)],
                "bubble": [(n - 1) / (stages * m + n - 1)] * n, "never waited for": [0] * n}
    return costs


def weights_of_stages(args: Namespace, stages: int, weights: Weights) -> list[Weights]:
    """Return the weights of each stage."""
    blocks = [of_stage.tolist() for of_stage in torch.arange(args.blocks).tensor_split(stages)]
    units = [{f"blocks.{number}" for number in of_stage} for of_stage in blocks]
    units[0] |= {"embedding"}
    units[-1] |= {"norm", "head"}
    return [{name: weight for name, weight in weights.items() if unit_of(name) in of_stage}
            for of_stage in units]


COSTS = {"gpipe": costs_of_stages(1, lambda rank, n, m: m),
         "1f1b": costs_of_stages(1, lambda rank, n, m: min(n - rank, m)),
         "interleaved": costs_of_stages(2, lambda rank, n, m: min(2 * m, 3 * n - 1 - 2 * rank))}


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train these variants; see main.py."""
    return data_parallel.run_worker(rank, world_size, args, WAYS)


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = data_parallel.WaysParser("transformer_parallel/pipeline", __doc__, WAYS, BUILTIN)
    parser.add_argument("--micro_batches", type=bounded(int, at_least=1), default=8, metavar="N",
                        help="micro-batches: pieces of a batch")
    parser.set_defaults(blocks=8)  # two stages of one block, on each of four ranks
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train; return the metrics (with `--check`, the differences) on the reporting process."""
    args = build_parser().parse_args(argv)
    results.require_room(args, copies=1)
    n, twice = args.world_size, [way for way in args.ways if WAYS[way].stages_of_rank == 2]
    stages = n * (2 if twice else 1)
    if args.batch_size % args.micro_batches:
        refuse(f"--batch_size {args.batch_size} must be a multiple of --micro_batches "
               f"{args.micro_batches}: all micro-batches must have the same number of rows")
    if args.blocks < stages:
        refuse(f"--blocks {args.blocks} must be at least {stages}: each stage needs a block")
    if twice and args.micro_batches % n:
        refuse(f"--micro_batches {args.micro_batches} must be a multiple of {n} ranks: "
               f"--ways {twice[0]} sends that number at a time")
    if "torch_1f1b" in args.ways and args.micro_batches < n:
        refuse(f"--micro_batches {args.micro_batches} must be at least {n}: --ways torch_1f1b "
               "needs one for each rank")
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
