r"""The same two stages as main.py, the way it is done today: `torch.distributed.pipelining`.

Nobody asks anybody: each process has a stage and a schedule, which says what it receives, computes
and sends next. There is no master and no RPC; tensors go point to point through a process group.
Under "gpipe", all micro-batches go forward first, and then all back; under "1f1b", a stage goes
back with one as soon as it can, so it keeps fewer.

    rank 0 "stage0"                      rank 1 "stage1"
    +--------------------+   features    +--------------------+
    | ResNetShard1       | ------------> | ResNetShard2, loss |
    | images             | <------------ | targets            |
    | SGD step           |   gradients   | SGD step           |
    +--------------------+               +--------------------+

    python model_parallel_resnet/schedules.py --num_splits 1 2 4 8   seconds per batch for each
    python model_parallel_resnet/schedules.py --schedule 1f1b        in the other order
    python model_parallel_resnet/schedules.py --timeline             a timeline of every process
    python model_parallel_resnet/schedules.py --check                the same as in one process?
    torchrun --nproc_per_node 2 model_parallel_resnet/schedules.py   rank 1 has the loss, and prints

Last line, about:
    resnet50, gpipe: loss 0.3568 -> 0.0521 |
    best with num_split 4: 2.20 s a batch, 1.43 times as fast as with 1 (ideal 1.60), ...
"""

import time

import torch
import torch.distributed as dist
from common import report, timeline
from common.cli import given, refuse
from common.launch import launch
from common.session import backend_for, device_for, group_options
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from model_parallel_resnet import main as rpc_pipeline
from model_parallel_resnet import measuring
from model_parallel_resnet.data import get_batch, require_sizes
from model_parallel_resnet.main import ResNetShard1, ResNetShard2
from model_parallel_resnet.results import finish

STAGES = ["stage0", "stage1"]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def role_name(rank, world_size):
    """Each rank has a stage."""
    return STAGES[rank]


def device_of_stage(args):
    """A GPU if each stage has one of its own: gloo, which also shares one, sends from the CPU."""
    device = device_for(args.device)
    return torch.device("cpu") if backend_for(device) == "gloo" else device


def layers_of(rank, args, device):
    """The layers of a shard, from a tensor to a tensor."""
    if rank == 0:
        return ResNetShard1(args, device).seq
    shard = ResNetShard2(args, device)
    return nn.Sequential(shard.seq, nn.Flatten(), shard.fc)


class Numbered(nn.Module):
    """A stage as a schedule calls it: with one micro-batch after the other, numbered from 0."""

    def __init__(self, layers, device):
        super().__init__()
        self.layers, self.device, self.micro_batch = layers, device, 0

    def forward(self, x):
        """A tensor to a tensor, both on the stage's device."""
        # A new tensor for the same numbers: the schedule receives into the same one in every step,
        # and what the timeline hangs on it would stay there.
        x = x.view_as(x)
        with measuring.span("forward", self.device, micro_batch=self.micro_batch):
            out = self.layers(x)
        measuring.record_backward(x, out, self.micro_batch)
        self.micro_batch += 1
        return out


class Pipeline:
    """The stage of this rank: a schedule for each number of micro-batches, its own optimizer."""

    def __init__(self, rank, args):
        self.rank, self.args = rank, args
        self.device = device_of_stage(args)
        self.model = Numbered(layers_of(rank, args, self.device), self.device)
        self.opt = measuring.SGD(self.model.parameters(), lr=args.lr)
        self.inputs, self.labels = (tensor.to(self.device) for tensor in get_batch(args))
        self.schedules = {number: self.make_schedule(number) for number in args.num_splits}

    def make_schedule(self, num_split):
        """Give the stage the shapes of a micro-batch: else it would find them with a forward.

        That one would compute with uninitialised memory, and leave it in BatchNorm's statistics.
        """
        like_input = self.inputs[: self.args.batch_size // num_split].to("meta")
        like_output = layers_of(0, self.args, "meta")(like_input)  # no numbers, only shapes
        if self.rank == 1:
            like_input = like_output.detach().requires_grad_()
            like_output = layers_of(1, self.args, "meta")(like_input)
        stage = PipelineStage(self.model, self.rank, len(STAGES), self.device,
                              like_input, like_output)
        # 1F1B wants as many micro-batches as stages, at least. With one there is only one order.
        few = num_split < len(STAGES)
        schedule_class = ScheduleGPipe if few else SCHEDULES[self.args.schedule]
        # A mean over each micro-batch; the schedule divides the sum of the gradients by num_split.
        return schedule_class(stage, num_split, loss_fn=nn.MSELoss())

    def train_step(self, num_split):
        """Forward, backward, and the step of this rank's own parameters; the loss on rank 1."""
        self.opt.zero_grad()
        self.model.micro_batch, losses = 0, []
        if self.rank == 0:
            self.schedules[num_split].step(self.inputs)
        else:
            self.schedules[num_split].step(target=self.labels, losses=losses)
        self.opt.step()
        return sum(loss.item() for loss in losses) / num_split if losses else None


def run_worker(rank, world_size, args):
    """Both ranks run all numbers of micro-batches in turns; rank 1 returns the metrics."""
    measuring.start(role_name(rank, world_size))
    dist.init_process_group(**group_options(args, device_of_stage(args)), rank=rank,
                            world_size=world_size)
    pipeline = Pipeline(rank, args)
    losses, windows = [], {num_split: [] for num_split in args.num_splits}
    for batch in range(args.num_batches + 1):
        for num_split in args.num_splits:
            dist.barrier()  # the clock starts when both are ready
            started = time.time()
            loss = pipeline.train_step(num_split)
            dist.barrier()  # and stops when both have made their step
            windows[num_split].append((started, time.time()))
            if rank == 1:
                losses.append(report.require_finite(loss, f"at step {len(losses) + 1}"))
                report.log(STAGES[1], f"{f'batch {batch}' if batch else 'warm-up'}  splits "
                                      f"{num_split}  loss {loss:.4f}  "
                                      f"{time.time() - started:.2f} s")
    recorded = [None] * world_size
    dist.all_gather_object(recorded, timeline.recorded())
    backend = dist.get_backend()
    dist.destroy_process_group()
    if rank != 1:
        return None
    return {"losses": losses, "windows": [times[1:] for times in windows.values()],
            "spans": recorded[0] | recorded[1], "schedule": args.schedule, "backend": backend}


def build_parser():
    """The flags of main.py, and the schedule."""
    parser = rpc_pipeline.build_parser(__doc__, "model_parallel_resnet/schedules", world_size=2)
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
