r"""The same two stages as main.py, the way it is done today: `torch.distributed.pipelining` (beside tutorial 6_7).

Nobody asks anybody: each process has a stage and a schedule, which says what it receives, computes and sends next.
There is no master and no RPC; the tensors go point to point through a process group. Under "gpipe", all micro-batches
go forward first, and then all back; under "1f1b", a stage goes back with one as soon as it can, so it keeps fewer.

    rank 0 "stage0"                      rank 1 "stage1"
    +--------------------+   features    +--------------------+
    | ResNetShard1       | ------------> | ResNetShard2, loss |
    | images             | <------------ | targets            |
    | SGD step           |   gradients   | SGD step           |
    +--------------------+               +--------------------+

    python model_parallel_resnet/schedules.py --num_splits 1 2 4 8      seconds per batch, for each of these
    python model_parallel_resnet/schedules.py --schedule 1f1b           in the other order
    python model_parallel_resnet/schedules.py --timeline                and a timeline of every process
    python model_parallel_resnet/schedules.py --check                   the same as in one process?
    torchrun --nproc_per_node 2 model_parallel_resnet/schedules.py      under torchrun; rank 1 has the loss, and prints

Last line, about:
    resnet50, gpipe: loss 0.3568 -> 0.0521 |
    best with num_split 4: 2.20 s a batch, 1.43 times as fast as with 1 (ideal 1.60), workers idle 25%
"""

import time

import torch
import torch.distributed as dist
from common import report, timeline
from common.cli import given, refuse
from common.launch import launch
from common.session import backend_for, device_for, group_options
from common.worker_env import keep_memory
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from model_parallel_resnet import main as rpc_pipeline
from model_parallel_resnet.data import get_batch
from model_parallel_resnet.results import finish
from model_parallel_resnet.stages import ResNetShard1, ResNetShard2, parameters_of

EVERY = rpc_pipeline.EVERY
STAGES = ["stage0", "stage1"]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def role_name(rank, world_size):
    """Each rank has a stage."""
    return STAGES[rank]


def device_of_stage(args):
    """A GPU if each stage has one of its own: gloo, which also shares one, sends only what is on the CPU."""
    device = device_for(args.device)
    return torch.device("cpu") if backend_for(device) == "gloo" else device


class Numbered(nn.Module):
    """A shard as a schedule calls it: with one micro-batch after the other, whose numbers the timeline wants."""

    def __init__(self, shard):
        super().__init__()
        self.shard, self.micro_batch = shard, 0

    def forward(self, x):
        """A tensor to a tensor, both on the shard's device."""
        self.micro_batch += 1
        # A new tensor for the same numbers: the schedule receives into the same one in every step, and what the
        # timeline hangs on it would stay there.
        return self.shard.compute(x.view_as(x), self.micro_batch - 1)


class Pipeline:
    """The stage of this rank, with a schedule for each number of micro-batches, and its own optimizer."""

    def __init__(self, rank, args):
        self.rank, self.args = rank, args
        self.device = device_of_stage(args)
        shard = (ResNetShard1, ResNetShard2)[rank](args.arch, args.num_classes, args.seed, self.device)
        self.model = Numbered(shard)
        self.opt = torch.optim.SGD(shard.parameters(), lr=args.lr)
        self.inputs, self.labels = (tensor.to(self.device) for tensor in get_batch(args))
        self.schedules = {num_split: self.make_schedule(num_split) for num_split in args.num_splits}

    def make_schedule(self, num_split):
        """Tell the stage the shapes of a micro-batch: otherwise it would find them out with a forward of its own.

        That one would compute with uninitialised memory, and leave it in the running statistics of BatchNorm.
        """
        like_input = self.inputs[: self.args.batch_size // num_split].to("meta")
        like_output = self.like_output(ResNetShard1, like_input)
        if self.rank == 1:
            like_input = like_output.detach().requires_grad_()
            like_output = self.like_output(ResNetShard2, like_input)
        stage = PipelineStage(self.model, self.rank, len(STAGES), self.device, like_input, like_output)
        # 1F1B wants as many micro-batches as there are stages, at least. With one, there is only one order anyway.
        schedule_class = ScheduleGPipe if num_split < len(STAGES) else SCHEDULES[self.args.schedule]
        # A mean over each micro-batch; the schedule then divides the sum of the gradients by their number.
        return schedule_class(stage, num_split, loss_fn=nn.MSELoss())

    def like_output(self, shard_class, like_input):
        """What a shard makes of such a tensor, by shape alone: on the "meta" device there are no numbers."""
        shard = shard_class(self.args.arch, self.args.num_classes, 0, "meta")
        return shard.rest(shard.first(like_input))

    def forward_backward(self, num_split):
        """One batch through the pipeline and back; on rank 1 the outputs and the loss, elsewhere None and None."""
        self.opt.zero_grad()
        self.model.micro_batch = 0
        if self.rank == 0:
            self.schedules[num_split].step(self.inputs)
            return None, None
        losses = []
        outputs = self.schedules[num_split].step(target=self.labels, losses=losses)
        return outputs, sum(loss.item() for loss in losses) / num_split

    def train_step(self, num_split):
        """Forward, backward, and the step of this rank's own parameters; the loss on rank 1."""
        _, loss = self.forward_backward(num_split)
        with timeline.span("step"):
            self.opt.step()
        return loss


def run_worker(rank, world_size, args):
    """Both ranks run all split counts in turns, a warm-up batch of each first; rank 1 returns the metrics."""
    keep_memory()
    timeline.start(role_name(rank, world_size))  # always: the idle shares are part of the result
    dist.init_process_group(**group_options(args, device_of_stage(args)), rank=rank, world_size=world_size)
    pipeline = Pipeline(rank, args)
    before = parameters_of(pipeline.model)
    losses, windows = [], {num_split: [] for num_split in args.num_splits}
    for batch in range(args.num_batches + 1):
        for num_split in args.num_splits:
            dist.barrier()  # the clock starts when both are ready, and stops when both have made their step
            started = time.time()
            losses.append(pipeline.train_step(num_split))
            dist.barrier()
            windows[num_split].append((started, time.time()))
            if rank == 1:
                report.log(STAGES[1], f"{'warm-up' if batch == 0 else f'batch {batch}'}  splits {num_split}  loss "
                                      f"{losses[-1]:.4f}  {windows[num_split][-1][1] - started:.2f} s")
    if torch.equal(before, parameters_of(pipeline.model)):
        raise ArithmeticError(f"the parameters of {STAGES[rank]} have not changed")
    recorded = [None] * world_size
    dist.all_gather_object(recorded, timeline.recorded())
    backend = dist.get_backend()
    dist.destroy_process_group()
    if rank != 1:
        return None
    rpc_pipeline.require_fall(losses, args)
    return {"losses": losses, "windows": [of_split[1:] for of_split in windows.values()],
            "spans": recorded[0] | recorded[1], "schedule": args.schedule, "backend": backend}

def record(rank, world_size, args):
    """For `check`: the same step with each split count, from the same weights; rank 1 returns what came of them."""
    torch.set_default_dtype(torch.float64)  # see compare_with_whole
    dist.init_process_group(**group_options(args, device_of_stage(args)), rank=rank, world_size=world_size)
    results = {}
    for num_split in args.num_splits:
        in_training_mode, _ = Pipeline(rank, args).forward_backward(num_split)
        pipeline = Pipeline(rank, args)  # anew: the initial weights
        pipeline.model.eval()
        outputs, _ = pipeline.forward_backward(num_split)
        gradients = torch.cat([param.grad.flatten().cpu() for param in pipeline.model.parameters()])
        pipeline.opt.step()
        gathered = [None] * world_size
        dist.all_gather_object(gathered, (gradients, parameters_of(pipeline.model)))
        if rank == 1:
            gradients, parameters = (torch.cat(halves)[::EVERY].tolist() for halves in zip(*gathered, strict=True))
            results[str(num_split)] = {
                "outputs": outputs.tolist(), "gradients": gradients, "parameters": parameters,
                "outputs, training mode": in_training_mode.tolist()}  # fmt: skip
    dist.destroy_process_group()
    return results if rank == 1 else None

def check(args):
    """Hold every split count against the whole model in one process; the differences, or None."""
    recorded = launch(record, args, role_name)
    return None if recorded is None else rpc_pipeline.compare_with_whole(recorded, args)


def build_parser():
    """The flags of main.py, and the schedule."""
    parser = rpc_pipeline.build_parser(__doc__, "model_parallel_resnet/schedules", world_size=2)
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe", help="the order of a stage's work")
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
    """Run the experiment, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    rpc_pipeline.require_sizes(args, [["batch", "first half"], ["batch", "second half"]])
    require_stages(args)
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    if metrics["backend"] == "gloo":
        args.device = "cpu"  # where the stages were: see `device_of_stage`
    return finish(metrics, args, args.schedule, STAGES, metrics["backend"])


if __name__ == "__main__":
    main()
