r"""The same model as main.py, the way it is done today: `torch.distributed.pipelining`.

There is no master and no RPC. Each process has a stage and a schedule, which lists what the stage
receives, computes and sends next. Tensors go point to point through a process group.

    --schedule      stages per rank    order
    gpipe           one half           all forwards, then all backwards, as in main.py
    1f1b            one half           one backward as soon as it can run, then one forward
    interleaved     quarters 0 2, 1 3  each micro-batch visits each rank twice: half the waiting
    zero_bubble     quarters 0 2, 1 3  weight gradients later than the input gradients, for which
                                       the other rank waits
    zero_bubble_v   quarters 0 3, 1 2  the same, but rank 0 has the loss

The column `ideal` of the table holds for the first two schedules.

What it gains: with "1f1b", a stage keeps the activations of fewer micro-batches than in main.py.
What it costs: all micro-batches must have the same shape.

    rank 0 "stage0"                      rank 1 "stage1"
    +--------------------+   features    +--------------------+
    | ResNetShard1       | ------------> | ResNetShard2, loss |
    | images             | <------------ | targets            |
    | SGD step           |   gradients   | SGD step           |
    +--------------------+               +--------------------+

    python model_parallel_resnet/schedules.py --num_splits 1 2 4 8   seconds per batch for each
    python model_parallel_resnet/schedules.py --schedule 1f1b        in another order
    python model_parallel_resnet/schedules.py --check                the same as in one process?
    python -m tracing model_parallel_resnet/schedules.py      with a timeline
    torchrun --nproc_per_node 2 model_parallel_resnet/schedules.py   rank 1 has the loss, and prints
                                                  (with zero_bubble_v: rank 0)

It ends with, about:
    resnet50, gpipe: loss 0.3568 -> 0.0521 | best with num_split 4: ... s a batch,
    ... times as fast as with 1 (ideal 1.60), workers idle ...%
"""

import argparse
import time
from collections.abc import Iterable

from common.cli import Parser, given, refuse, require_own_gpus
from common.program import run_program
from common.session import device_of_group, group_options, keep_memory

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from model_parallel_resnet import results
from model_parallel_resnet.data import get_batch, require_sizes
from model_parallel_resnet.main import ARCHS, ResNetShard1, ResNetShard2, add_flags
from model_parallel_resnet.measuring import TimedStage
from model_parallel_resnet.results import Batches

STAGES = ["stage0", "stage1"]
LOOP, V = [[0, 2], [1, 3]], [[0, 3], [1, 2]]  # the stages of each rank, for a model of four stages
SCHEDULES = {"gpipe": (ScheduleGPipe, [[0], [1]]), "1f1b": (Schedule1F1B, [[0], [1]]),
             "interleaved": (ScheduleInterleaved1F1B, LOOP),
             "zero_bubble": (ScheduleInterleavedZeroBubble, LOOP),
             "zero_bubble_v": (ScheduleZBVZeroBubble, V)}


def layers_of(stage: int, num_stages: int, args: argparse.Namespace,
              device: torch.device) -> nn.Sequential:
    """Return the layers of a stage, which is a half or a quarter of the model.

    Args:
        stage: Number of the stage.
        num_stages: Number of all stages, 2 or 4.
        args: Parsed flags.
        device: Device of the layers.
    """
    block, blocks = ARCHS[args.arch]
    if stage < num_stages // 2:
        layers, cut = ResNetShard1(block, blocks[:2], device, 2 * args.seed + 1).seq, 5  # layer2
    else:
        shard = ResNetShard2(block, blocks[2:], args.num_classes, device, 2 * args.seed + 2)
        layers, cut = nn.Sequential(*shard.seq, nn.Flatten(), shard.fc), 1  # layer4
    if num_stages == len(STAGES):
        return layers
    return layers[cut:] if stage % 2 else layers[:cut]


class Pipeline:
    """The stages of this rank, their optimizer, and a schedule for each number of micro-batches.

    Args:
        rank: This process's rank.
        args: Parsed flags.
    """

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.args = args
        self.schedule_class, places = SCHEDULES[args.schedule]
        self.num_stages, self.stages = sum(map(len, places)), places[rank]
        self.has_loss = self.num_stages - 1 in self.stages
        self.device = device_of_group(args)
        self.models = nn.ModuleList(layers_of(stage, self.num_stages, args, self.device)
                                    for stage in self.stages)
        self.opt = optim.SGD(self.models.parameters(), lr=args.lr)
        self.inputs, self.labels = (tensor.to(self.device) for tensor in get_batch(args))
        self.schedules = {number: self.make_schedule(number) for number in args.num_splits}

    def make_schedule(self, num_split: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return the schedule for `num_split` micro-batches.

        Each stage is told the shapes of its tensors. Otherwise it would run a forward pass on
        uninitialized memory to find them, which would change BatchNorm's running statistics.
        """
        shapes = [self.inputs[: self.args.batch_size // num_split].to("meta")]
        for stage in range(self.num_stages):  # "meta" tensors have no numbers, only shapes
            layers = layers_of(stage, self.num_stages, self.args, torch.device("meta"))
            shapes.append(layers(shapes[-1]).detach().requires_grad_())
        stages = [TimedStage(model, stage, self.num_stages, self.device,
                             *shapes[stage : stage + 2])
                  for model, stage in zip(self.models, self.stages, strict=True)]
        # The loss is a mean over one micro-batch. The schedule divides the gradients by num_split.
        options = {"n_microbatches": num_split, "loss_fn": nn.MSELoss()}
        if len(stages) > 1:
            return self.schedule_class(stages, **options)
        # 1F1B needs at least one micro-batch per stage. One micro-batch has only one order.
        few = num_split < self.num_stages
        return (ScheduleGPipe if few else self.schedule_class)(stages[0], **options)

    def train_step(self, num_split: int) -> float | None:
        """Run forward, backward and step; return the loss on the rank that computes it, or None."""
        self.opt.zero_grad()
        losses = []
        images = [self.inputs] if 0 in self.stages else []
        targets = {"target": self.labels, "losses": losses} if self.has_loss else {}
        self.schedules[num_split].step(*images, **targets)
        self.opt.step()
        return sum(loss.item() for loss in losses) / num_split if losses else None


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank, which holds one stage or two."""
    return STAGES[rank]


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Train with each of `--num_splits` alternately; the rank with the loss returns the metrics."""
    keep_memory()  # see main.py
    dist.init_process_group(**group_options(args, device_of_group(args)), rank=rank,
                            world_size=world_size)
    pipeline = Pipeline(rank, args)
    batches = Batches(STAGES[rank], args, show=pipeline.has_loss)
    for batch in range(args.num_batches + 1):  # the first one is a warm-up
        for num_split in args.num_splits:  # alternately, so that a slow moment slows all of them
            started, busy = time.perf_counter(), TimedStage.busy.seconds
            dist.barrier()  # no rank begins before all ranks have read the clock
            loss = pipeline.train_step(num_split)
            dist.barrier()  # all ranks have finished their step
            batches.add(batch, num_split, time.perf_counter() - started, loss,
                        TimedStage.busy.seconds - busy)
    idle = [None] * world_size
    dist.all_gather_object(idle, list(batches.idle.values()))
    metrics = {**batches.metrics(), "idle": idle, "schedule": args.schedule,
               "backend": dist.get_backend()}
    dist.destroy_process_group()
    return metrics if pipeline.has_loss else None


def require_stages(args: argparse.Namespace, schedules: Iterable[str]) -> None:
    """Refuse numbers of micro-batches that a schedule cannot order, and fewer GPUs than ranks.

    Args:
        args: Parsed flags.
        schedules: Names of the schedules that will run.

    Raises:
        SystemExit: 2 after one line, before any process starts.
    """
    for num_split in args.num_splits:
        if args.batch_size % num_split:
            refuse(f"--num_splits {num_split} must be a divisor of {given(args, 'batch_size')}: "
                   "all micro-batches must have the same shape")
        # torch's schedules for several stages per rank work in rounds.
        rounds = max(1, num_split // len(STAGES))
        for name in sorted({"interleaved", "zero_bubble"}.intersection(schedules)):
            if num_split % rounds:
                refuse(f"--num_splits {num_split} must be even, or 1 or 3, with --schedule {name}")
    require_own_gpus(args)


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Print, write and plot as main.py does; return all metrics."""
    backend = metrics["backend"]
    device = "cpu" if backend == "gloo" else None  # see `device_of_group`
    return results.finish(metrics, args, args.schedule, backend, device)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py, and `--schedule`."""
    parser = add_flags(Parser("model_parallel_resnet/schedules", __doc__, world_size=2))
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe",
                        help="order in which a stage computes its micro-batches")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process if `--check` is given.

    Args:
        argv: Command-line flags, `sys.argv` by default.

    Returns:
        The metrics (with `--check`, the differences) on the reporting process, None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch", "first half"], ["batch", "second half"]])
    require_stages(args, [args.schedule])
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
