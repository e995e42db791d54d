r"""The same model as main.py, the way it is done today: `torch.distributed.pipelining`.

Nobody asks anybody: each process has a stage and a schedule, which lists what it receives, computes
and sends next. There is no master and no RPC; tensors go point to point through a process group.
Under "gpipe", all micro-batches go forward first, and then all back; under "1f1b", a stage goes
back with one as soon as it can, so it keeps fewer activations. The others cut the model in four:
"interleaved" gives a rank stages 0 and 2 or 1 and 3, each micro-batch comes twice, and who waits
at the beginning waits half as long; the zero-bubble ones also compute the gradients of the weights
apart, later than those of the inputs, for which the other rank waits. "zero_bubble" places the
stages as "interleaved" does, "zero_bubble_v" 0 and 3 on rank 0, 1 and 2 on rank 1: so rank 0 has
the loss. The column `ideal` is that of the first two.

What it wins: under "1f1b", a stage keeps the activations of fewer micro-batches than in main.py.
What it costs: all micro-batches have the same shape.

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
    resnet50, gpipe: loss 0.3568 -> 0.0521 |
    best with num_split 4: ... s a batch, ... times as fast as with 1 (ideal 1.60), ...
"""

import argparse
import time
from collections.abc import Iterable

from common.cli import Parser, given, refuse, require_own_gpus
from common.program import run_program
from common.session import device_of_group, group_options

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.pipelining import (
    PipelineStage,
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
from model_parallel_resnet.measuring import gather_work, record_stages
from model_parallel_resnet.results import Batches

STAGES = ["stage0", "stage1"]
LOOP, V = [[0, 2], [1, 3]], [[0, 3], [1, 2]]  # the stages of each rank, where the model is in four
SCHEDULES = {"gpipe": (ScheduleGPipe, [[0], [1]]), "1f1b": (Schedule1F1B, [[0], [1]]),
             "interleaved": (ScheduleInterleaved1F1B, LOOP),
             "zero_bubble": (ScheduleInterleavedZeroBubble, LOOP),
             "zero_bubble_v": (ScheduleZBVZeroBubble, V)}


def layers_of(stage: int, num_stages: int, args: argparse.Namespace,
              device: torch.device) -> nn.Sequential:
    """Make the layers of a stage, a half or a quarter of the model, from a tensor to a tensor."""
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
    """Has the stages of this rank, their optimizer, a schedule for each number of micro-batches."""

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
        """Make the schedule for so many micro-batches, whose shapes the stages get.

        Without them, a stage would find the shapes by a forward on uninitialised memory, which
        would stay in BatchNorm's statistics.
        """
        shapes = [self.inputs[: self.args.batch_size // num_split].to("meta")]
        for stage in range(self.num_stages):  # no numbers, only shapes
            layers = layers_of(stage, self.num_stages, self.args, torch.device("meta"))
            shapes.append(layers(shapes[-1]).detach().requires_grad_())
        stages = [PipelineStage(model, stage, self.num_stages, self.device,
                                *shapes[stage : stage + 2])
                  for model, stage in zip(self.models, self.stages, strict=True)]
        # A mean over each micro-batch; the schedule divides the sum of the gradients by num_split.
        options = {"n_microbatches": num_split, "loss_fn": nn.MSELoss()}
        if len(stages) > 1:
            return self.schedule_class(stages, **options)
        # 1F1B wants as many micro-batches as stages, at least. With one there is only one order.
        few = num_split < self.num_stages
        return (ScheduleGPipe if few else self.schedule_class)(stages[0], **options)

    def train_step(self, num_split: int) -> float | None:
        """Go forward, back, and step this rank's own parameters; return the loss where it is."""
        self.opt.zero_grad()
        losses = []
        images = [self.inputs] if 0 in self.stages else []
        targets = {"target": self.labels, "losses": losses} if self.has_loss else {}
        self.schedules[num_split].step(*images, **targets)
        self.opt.step()
        return sum(loss.item() for loss in losses) / num_split if losses else None


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: each has a stage, or two."""
    return STAGES[rank]


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Train with all numbers of micro-batches in turns; the rank with the loss returns metrics."""
    record_stages(role_name(rank, world_size), PipelineStage)  # the table's idle times
    dist.init_process_group(**group_options(args, device_of_group(args)), rank=rank,
                            world_size=world_size)
    pipeline = Pipeline(rank, args)
    batches = Batches(STAGES[rank], args, show=pipeline.has_loss)
    for batch in range(args.num_batches + 1):
        for num_split in args.num_splits:
            started = time.time()
            dist.barrier()  # neither begins before both have read the clock
            loss = pipeline.train_step(num_split)
            dist.barrier()  # both have made their step
            if pipeline.has_loss:
                batches.add(batch, num_split, started, loss)
    metrics = batches.metrics(gather_work())
    metrics |= {"schedule": args.schedule, "stages_per_rank": len(pipeline.stages),
                "backend": dist.get_backend()}
    dist.destroy_process_group()
    return metrics if pipeline.has_loss else None


def require_stages(args: argparse.Namespace, schedules: Iterable[str]) -> None:
    """Refuse micro-batches that one of these cannot order, and fewer GPUs than stages."""
    for num_split in args.num_splits:
        if args.batch_size % num_split:
            refuse(f"--num_splits {num_split} must be a divisor of {given(args, 'batch_size')}: "
                   "here, all micro-batches have the same shape")
        rounds = max(1, num_split // len(STAGES))  # of torch's schedules for several stages a rank
        for name in sorted({"interleaved", "zero_bubble"}.intersection(schedules)):
            if num_split % rounds:
                refuse(f"--num_splits {num_split} must be even, or 1 or 3, with --schedule {name}")
    require_own_gpus(args)


def finish(metrics: dict, args: argparse.Namespace) -> dict:
    """Print, write and draw as main.py does."""
    backend = metrics["backend"]
    device = "cpu" if backend == "gloo" else None  # see `device_of_group`
    return results.finish(metrics, args, args.schedule, STAGES, backend, device)


def build_parser() -> Parser:
    """Return the parser: the flags of main.py, and `--schedule`."""
    parser = add_flags(Parser("model_parallel_resnet/schedules", __doc__, world_size=2))
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe",
                        help="the order of a stage's work")
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch", "first half"], ["batch", "second half"]])
    require_stages(args, [args.schedule])
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
