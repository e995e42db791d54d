r"""The same model as main.py, the way it is done today: `torch.distributed.pipelining`.

Nobody asks anybody: each process has a stage and a schedule, which says what it receives, computes
and sends next. There is no master and no RPC; tensors go point to point through a process group.
Under "gpipe", all micro-batches go forward first, and then all back; under "1f1b", a stage goes
back with one as soon as it can, so it keeps fewer. The others cut the model in four:
"interleaved" gives a rank stages 0 and 2 or 1 and 3, each micro-batch comes twice, and who waits
at the beginning waits half as long; the zero-bubble ones also compute the gradients of the weights
apart, later than those of the inputs, for which the other rank waits. The column `ideal` is that of
the first two.

    rank 0 "stage0"                      rank 1 "stage1"
    +--------------------+   features    +--------------------+
    | ResNetShard1       | ------------> | ResNetShard2, loss |
    | images             | <------------ | targets            |
    | SGD step           |   gradients   | SGD step           |
    +--------------------+               +--------------------+

    python model_parallel_resnet/schedules.py --num_splits 1 2 4 8   seconds per batch for each
    python model_parallel_resnet/schedules.py --schedule 1f1b        in another order
    python model_parallel_resnet/schedules.py --timeline             a timeline of every process
    python model_parallel_resnet/schedules.py --check                the same as in one process?
    torchrun --nproc_per_node 2 model_parallel_resnet/schedules.py   rank 1 has the loss, and prints
                                                  (with zero_bubble_v: rank 0)

Last line, about:
    resnet50, gpipe: loss 0.3568 -> 0.0521 |
    best with num_split 4: 2.20 s a batch, 1.43 times as fast as with 1 (ideal 1.60), ...
"""

import time

import torch
import torch.distributed as dist
from common import report, timeline
from common.cli import Parser, given, refuse
from common.launcher import launch
from common.session import backend_for, device_for, group_options
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from model_parallel_resnet import measuring
from model_parallel_resnet.data import get_batch, require_sizes
from model_parallel_resnet.flags import add_flags
from model_parallel_resnet.main import ARCHS, ResNetShard1, ResNetShard2
from model_parallel_resnet.results import finish, log_batch

STAGES = ["stage0", "stage1"]
LOOP, V = [[0, 2], [1, 3]], [[0, 3], [1, 2]]  # the stages of each rank, where the model is in four
SCHEDULES = {"gpipe": (ScheduleGPipe, [[0], [1]]), "1f1b": (Schedule1F1B, [[0], [1]]),
             "interleaved": (ScheduleInterleaved1F1B, LOOP),
             "zero_bubble": (ScheduleInterleavedZeroBubble, LOOP),
             "zero_bubble_v": (ScheduleZBVZeroBubble, V)}


def role_name(rank, world_size):
    """Each rank has a stage, or two."""
    return STAGES[rank]


def device_of_stage(args):
    """A GPU if each stage has one of its own: gloo, which also shares one, sends from the CPU."""
    device = device_for(args.device)
    return torch.device("cpu") if backend_for(device) == "gloo" else device


def layers_of(stage, num_stages, args, device):
    """The layers of a stage, a half or a quarter of the model, from a tensor to a tensor."""
    if stage < num_stages // 2:
        layers, cut = ResNetShard1(args, device).seq, 5  # before layer2
    else:
        shard = ResNetShard2(args, device)
        layers, cut = nn.Sequential(*shard.seq, nn.Flatten(), shard.fc), 1  # before layer4
    if num_stages == len(STAGES):
        return layers
    return layers[cut:] if stage % 2 else layers[:cut]


class Numbered(nn.Module):
    """A stage as a schedule calls it: with one micro-batch after the other, numbered from 0."""

    def __init__(self, layers, device, stage):
        super().__init__()
        self.layers, self.device, self.stage, self.micro_batch = layers, device, stage, 0

    def forward(self, x):
        """A tensor to a tensor, both on the stage's device."""
        # A new tensor for the same numbers: the schedule receives into the same one in every step,
        # and what the timeline hangs on it would stay there.
        x = x.view_as(x)
        with measuring.span("forward", self.device, micro_batch=self.micro_batch, stage=self.stage):
            out = self.layers(x)
        measuring.record_backward(x, out, self.micro_batch, stage=self.stage)
        self.micro_batch += 1
        return out


class Pipeline:
    """The stages of this rank: a schedule for each number of micro-batches, its own optimizer."""

    def __init__(self, rank, args):
        self.args = args
        self.schedule_class, places = SCHEDULES[args.schedule]
        self.num_stages, self.stages = sum(map(len, places)), places[rank]
        self.has_loss = self.num_stages - 1 in self.stages
        self.device = device_of_stage(args)
        self.models = nn.ModuleList(
            Numbered(layers_of(stage, self.num_stages, args, self.device), self.device, stage)
            for stage in self.stages)
        self.opt = measuring.SGD(self.models.parameters(), lr=args.lr)
        self.inputs, self.labels = (tensor.to(self.device) for tensor in get_batch(args))
        self.schedules = {number: self.make_schedule(number) for number in args.num_splits}

    def make_schedule(self, num_split):
        """Give the stages the shapes of a micro-batch: else they would find them with a forward.

        That one would compute with uninitialised memory, and leave it in BatchNorm's statistics.
        """
        shapes = [self.inputs[: self.args.batch_size // num_split].to("meta")]
        for stage in range(self.num_stages):  # no numbers, only shapes
            layers = layers_of(stage, self.num_stages, self.args, "meta")
            shapes.append(layers(shapes[-1]).detach().requires_grad_())
        stages = [PipelineStage(model, model.stage, self.num_stages, self.device,
                                *shapes[model.stage : model.stage + 2]) for model in self.models]
        for stage in stages:
            measuring.record_weight_gradients(stage)
        # A mean over each micro-batch; the schedule divides the sum of the gradients by num_split.
        options = {"n_microbatches": num_split, "loss_fn": nn.MSELoss()}
        if len(stages) > 1:
            return self.schedule_class(stages, **options)
        # 1F1B wants as many micro-batches as stages, at least. With one there is only one order.
        few = num_split < self.num_stages
        return (ScheduleGPipe if few else self.schedule_class)(stages[0], **options)

    def train_step(self, num_split):
        """Forward, backward, and the step of this rank's own parameters; the loss where it is."""
        self.opt.zero_grad()
        losses = []
        for model in self.models:
            model.micro_batch = 0
        images = [self.inputs] if 0 in self.stages else []
        targets = {"target": self.labels, "losses": losses} if self.has_loss else {}
        self.schedules[num_split].step(*images, **targets)
        self.opt.step()
        return sum(loss.item() for loss in losses) / num_split if losses else None


def run_worker(rank, world_size, args):
    """Both ranks run all numbers of micro-batches in turns; the one with the loss has metrics."""
    measuring.start(role_name(rank, world_size))
    dist.init_process_group(**group_options(args, device_of_stage(args)), rank=rank,
                            world_size=world_size)
    pipeline = Pipeline(rank, args)
    losses, windows = [], {num_split: [] for num_split in args.num_splits}
    for batch in range(args.num_batches + 1):
        for num_split in args.num_splits:
            dist.barrier()  # both are ready
            started = time.time()
            dist.barrier()  # and neither begins before both have read the clock
            loss = pipeline.train_step(num_split)
            dist.barrier()  # both have made their step
            windows[num_split].append((started, time.time()))
            if pipeline.has_loss:
                losses.append(report.require_finite(loss, f"at step {len(losses) + 1}"))
                log_batch(STAGES[rank], batch, num_split, loss, time.time() - started)
    recorded = [None] * world_size
    dist.all_gather_object(recorded, timeline.recorded())
    backend = dist.get_backend()
    dist.destroy_process_group()
    if not pipeline.has_loss:
        return None
    return {"losses": losses, "windows": [times[1:] for times in windows.values()],
            "spans": recorded[0] | recorded[1], "schedule": args.schedule,
            "stages_per_rank": len(pipeline.stages), "backend": backend}


def build_parser():
    """Those of main.py, and the schedule."""
    parser = add_flags(Parser("model_parallel_resnet/schedules", __doc__, world_size=2), ARCHS)
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe",
                        help="the order of a stage's work")
    return parser


def require_stages(args):
    """Refuse micro-batches of several shapes, and fewer GPUs than stages."""
    for num_split in args.num_splits:
        if args.batch_size % num_split:
            refuse(f"--num_splits {num_split} must be a divisor of {given(args, 'batch_size')}: "
                   "here, all micro-batches have the same shape")
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and args.rank is None and gpus < len(STAGES):
        refuse(f"--device cuda must be cpu or auto: torch sees {gpus} GPUs, and here each stage "
               "needs its own", rank=None)


def main(argv=None):
    """Run the experiment or `--check`; the metrics in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    require_sizes(args, [["batch", "first half"], ["batch", "second half"]])
    require_stages(args)
    if args.check:
        from model_parallel_resnet.schedules_check import check

        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    if metrics["backend"] == "gloo":
        args.device = "cpu"  # where the stages were: see `device_of_stage`
    return finish(metrics, args, args.schedule, STAGES, metrics["backend"])


if __name__ == "__main__":
    main()
