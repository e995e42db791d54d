r"""DistributedDataParallel from the ground up: a replica on every rank, gradients averaged (tutorial 6_3).

Every rank holds the same model and samples of its own. In `backward()`, DDP averages the gradients over all ranks, so
every rank's optimizer takes the very step that a single process with all the samples would take.

    rank 0                                                           rank 1
    +-------------------------+                                      +-------------------------+
    | samples of rank 0       |                                      | samples of rank 1       |
    | DDP(model)              | ----- the weights of rank 0 -------> | DDP(model)              |
    | forward                 |                                      | forward                 |
    | backward: gradients     | <--- all-reduce: their average ----> | backward: gradients     |
    | optimizer.step()        |                                      | optimizer.step()        |
    +-------------------------+        again the same weights        +-------------------------+

    python ddp_basic/main.py --world_size 2                       three demos: basic, checkpoint, model_parallel
    python ddp_basic/main.py --demo skew --slow_rank 1 --delay 0.5 --timeout 2
    python ddp_basic/main.py --check                              the same numbers as a single process?
    torchrun --nproc_per_node 2 ddp_basic/main.py                 under torchrun
    python ddp_basic/main.py --world_size 2 --rank 1 \
        --master_addr HOST --master_port 29500                    one rank per terminal or machine

Last line, about:
    basic, checkpoint, model_parallel on 2 ranks: loss 1.169 -> 0.572, gradients within 1.9e-07 of a single process, ...
"""

import os
import statistics
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from common import report
from common.cli import LONGEST_S, Parser, bounded, ranks_here, refuse, require_memory
from common.launch import launch
from common.session import device_for, group_options
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_basic import skew
from ddp_basic.toy import ToyModel, ToyMpModel, flat, loss_on, seeded, toy_samples, train

JOIN_TIMEOUT_S = 60.0  # processes take seconds to start, some longer than others: a tight --timeout is not for that


def role_name(rank, world_size):
    """All ranks do the same."""
    return f"rank{rank}"


def setup(rank, world_size, args):
    """Join the process group (tutorial 6_3, "Basic Use Case"): gloo, or nccl where every rank has a GPU of its own."""
    options = group_options(args, device_for(args.device))  # no fixed port among them, on which two runs would meet
    options["timeout"] = timedelta(seconds=max(args.timeout, JOIN_TIMEOUT_S))
    dist.init_process_group(**options, rank=rank, world_size=world_size)


def cleanup():
    """Leave the process group. Not after an error: it would only make the others fail first."""
    dist.destroy_process_group()


def wrap(model, device, group=None):
    """The model in DDP, which makes rank 0's weights everybody's; all its parameters are on `device`."""
    return DDP(model, device_ids=[device.index] if device.type == "cuda" else None, process_group=group)


def demo_basic(rank, world_size, args):
    """Wrap a model and train it (tutorial 6_3, "Basic Use Case")."""
    device = device_for(args.device)
    ddp_model = wrap(seeded(ToyModel, args.seed).to(device), device)
    return train_and_prove("basic", ddp_model, rank, world_size, args)


def demo_checkpoint(rank, world_size, args):
    """Save on one rank, load on all, train what was loaded (tutorial 6_3, "Save and Load Checkpoints")."""
    device = device_for(args.device)
    ddp_model = wrap(seeded(ToyModel, args.seed).to(device), device)
    loaded_model = wrap(seeded(ToyModel, args.seed + 1).to(device), device)  # other weights, until it has loaded

    path = [args.private_path]  # each process that was started by itself has made one up:
    dist.broadcast_object_list(path)  # all take rank 0's
    if rank == 0:  # the replicas are equal, so one rank's do; several writers would race for the file
        with report.replacing(path[0]) as temporary:
            torch.save(ddp_model.state_dict(), temporary)
    dist.barrier()  # nobody may read before rank 0 has written
    # Saved from rank 0's device: without map_location, all ranks would load onto that one.
    loaded_model.load_state_dict(torch.load(path[0], map_location=device, weights_only=True))
    dist.barrier()  # rank 0 may not delete before everybody has read
    if rank == 0:
        path[0].unlink()

    difference = (flat(loaded_model.parameters()) - flat(ddp_model.parameters())).abs().max().item()
    return train_and_prove("checkpoint", loaded_model, rank, world_size, args, loaded=difference)


def demo_model_parallel(rank, world_size, args):
    """Replicas that are each split over two devices (tutorial 6_3, "Combining DDP with Model Parallelism")."""
    dev0 = dev1 = device_for(args.device)
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if dev0.type == "cuda" and torch.cuda.device_count() >= 2 * local_world_size:
        dev1 = torch.device("cuda", local_world_size + local_rank)  # behind the GPUs that are the dev0 of some rank
    mp_model = seeded(ToyMpModel, args.seed, dev0, dev1)
    ddp_mp_model = DDP(mp_model)  # no device_ids: the model is on two devices, and moves its inputs itself
    return train_and_prove("model_parallel", ddp_mp_model, rank, world_size, args)


def train_and_prove(demo, ddp_model, rank, world_size, args, **differences):
    """Train on this rank's samples and hold the outcome against a single process; rank 0 prints a row per rank.

    Returns:
        The loss on the samples of all ranks before and after, and `{what: largest difference on any rank}`.
    """
    own, joined = toy_samples([rank], args), toy_samples(range(world_size), args)
    before, own_before = loss_on(joined, ddp_model.module), loss_on(own, ddp_model.module)
    gradients = train(ddp_model, own, args)
    after, own_after = loss_on(joined, ddp_model.module), loss_on(own, ddp_model.module)

    alone = train(seeded(ToyModel, args.seed), joined, args)  # the oracle: no DDP, all samples in one batch
    differences["gradients"] = ((gradients - alone).abs().max() / alone.abs().max()).item()
    parameters = flat(ddp_model.parameters())
    reference = [parameters]
    dist.broadcast_object_list(reference)  # rank 0's
    differences["parameters"] = (parameters - reference[0]).abs().max().item()

    rows = gather({"own_before": own_before, "own_after": own_after, **differences}, world_size)
    if rank == 0:
        log(f"{demo}: loss {before:.3f} -> {after:.3f} on the samples of all ranks, in {args.steps} steps")
        log("  rank   loss on its own   differences:" + "".join(f"{what:>12}" for what in differences))
        for other, row in enumerate(rows):
            own_loss = f"{row['own_before']:.3f} -> {row['own_after']:.3f}"
            log(f"  {other:4}   {own_loss:>15}               " + "".join(f"{row[what]:12.1e}" for what in differences))
    worst = {what: torch.tensor([row[what] for row in rows]).max().item() for what in differences}  # also NaN
    return {"loss_before": before, "loss_after": after, **worst}


def demo_skew(rank, world_size, args):
    """One rank is slower, and all wait for it, up to `--timeout` (tutorial 6_3, "Skewed Processing Speeds")."""
    device = device_for(args.device)
    models, samples = [seeded(ToyModel, args.seed).to(device) for _ in range(2)], toy_samples([rank], args)
    even = skew.timed_steps(wrap(models[0], device), samples, 0.0, args)
    if rank == 0:
        log(f"skew: rank {args.slow_rank} takes {args.delay:g} s longer over each of {args.steps} steps")
    # A group with a timeout of its own, for the skewed steps alone. gloo, even where the run has nccl: there, a timeout
    # ends the process without a word.
    group = dist.new_group(timeout=timedelta(seconds=args.timeout), backend="gloo")
    delay = args.delay if rank == args.slow_rank else 0.0
    spans = skew.timed_steps(wrap(models[1], device, group), samples, delay, args)

    row = {"compute_s": statistics.median(backward - start for start, backward, _ in spans),
           "wait_s": statistics.median(end - backward for _, backward, end in spans),
           "step_s": statistics.median(end - start for start, _, end in spans),
           "even_step_s": statistics.median(end - start for start, _, end in even), "spans": spans}
    rows = gather(row, world_size)
    if rank == 0:
        log("  rank   computes   in backward()    a step   a step without the delay")
        for other, row in enumerate(rows):
            log("  {:4} {compute_s:8.3f} s {wait_s:13.3f} s {step_s:7.3f} s {even_step_s:24.3f} s".format(other, **row))
    return {key: [row[key] for row in rows] for key in row}


def gather(row, world_size):
    """Every rank's row, for rank 0 to print: rows that the ranks printed themselves would interleave."""
    rows = [None] * world_size
    dist.all_gather_object(rows, row)
    return rows


def log(text):
    """On rank 0."""
    report.log(role_name(0, None), text)


DEMOS = {"basic": demo_basic, "checkpoint": demo_checkpoint, "model_parallel": demo_model_parallel, "skew": demo_skew}
PROVEN = ["basic", "checkpoint", "model_parallel"]  # skew is about time, which has no oracle


def run_worker(rank, world_size, args):
    """Join, run the chosen demos one after the other, leave; rank 0 returns the metrics."""
    setup(rank, world_size, args)
    metrics = {"backend": dist.get_backend()}
    for demo in args.demos:
        metrics[demo] = DEMOS[demo](rank, world_size, args)
    cleanup()
    return metrics if rank == 0 else None


def run_demo(demos, args):
    """Start the ranks, which run `demos`, by name; the metrics in the process that reports, None elsewhere."""
    args.demos = list(demos)
    # The checkpoint of this run alone: at the tutorial's path, two runs would overwrite each other's.
    args.private_path = args.output_dir.resolve() / f"model.{uuid.uuid4().hex}.checkpoint"
    try:
        return launch(run_worker, args, role_name)
    finally:
        args.private_path.unlink(missing_ok=True)  # where a rank failed before it was deleted


def check(args):
    """Hold the demos against a single process; the differences, or None where nothing is reported."""
    demos = PROVEN if args.demo == "all" else [args.demo]
    metrics = run_demo(demos, args)
    if metrics is None:
        return None
    # Equal to the bit, but for the gradients: the average of the ranks' means is the mean of all samples, summed in
    # another order. float32 rounds that, by a few 1e-7 of the largest gradient.
    limits = {"gradients": 1e-5, "parameters": 0, "loaded": 0}
    ours = {f"{demo}, {what}": metrics[demo][what] for demo in demos for what in limits if what in metrics[demo]}
    return report.compare(ours, dict.fromkeys(ours, 0.0), {name: limits[name.split(", ")[1]] for name in ours})


def build_parser():
    """The flags of this example."""
    parser = Parser("ddp_basic", __doc__, world_size=2)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--demo", choices=[*PROVEN, "all", "skew"], default="all", help="all: the first three")
    add("--steps", type=count, default=10, metavar="N", help="steps of each demo")
    add("--local_batch_size", type=count, default=20, metavar="N", help="samples of each rank")
    add("--lr", type=bounded(float, above=0), default=0.5, help="learning rate of SGD")
    add("--slow_rank", type=bounded(int, at_least=0), metavar="R", help="of --demo skew (default: the last)")
    add("--delay", type=bounded(float, at_least=0, at_most=LONGEST_S), default=0.5, metavar="S",
        help="seconds it loses in each step")
    return parser


def main(argv=None):
    """Run the demos, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    if args.slow_rank is None:
        args.slow_rank = args.world_size - 1
    if args.slow_rank >= args.world_size:
        refuse(f"--slow_rank {args.slow_rank} must be below --world_size {args.world_size}")
    if args.check and args.demo == "skew":
        refuse("--demo skew cannot be given with --check: times have no oracle")
    # Each rank has its own samples, inputs (n, 10) and labels (n, 5) of 4 bytes, and for the proof
    # those of all ranks.
    shares = 1 if args.demo == "skew" else 1 + args.world_size
    of_rank = shares * args.local_batch_size * 15 * 4
    require_memory(args, ["local_batch_size"], len(ranks_here(args)) * of_rank)
    if args.check:
        return check(args)
    demos = PROVEN if args.demo == "all" else [args.demo]
    metrics = run_demo(demos, args)
    if metrics is None:
        return None
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    if args.demo == "skew":
        skew.plot(metrics["skew"]["spans"], args)
        step_s, even_step_s = (max(metrics["skew"][key]) for key in ("step_s", "even_step_s"))
        print(f"skew on {args.world_size} ranks: a step takes {step_s:.3f} s where rank {args.slow_rank} takes "
              f"{args.delay:g} s longer, {even_step_s:.3f} s where none does")
        return metrics
    before, after = (metrics[demos[0]][key] for key in ("loss_before", "loss_after"))  # the same in every demo
    gradients, parameters = (max(metrics[demo][key] for demo in demos) for key in ("gradients", "parameters"))
    print(f"{', '.join(demos)} on {args.world_size} ranks: loss {before:.3f} -> {after:.3f}, gradients within "
          f"{gradients:.1e} of a single process, parameters within {parameters:.0e} of rank 0's")
    return metrics


if __name__ == "__main__":
    main()
