"""What `train.py` shows: the accuracy, a line for each epoch, the timeline, the last line."""

import time

import torch
import torch.distributed as dist
from common import report, timeline, timeline_report

STEPS_DRAWN = 4  # with --timeline
TIMELINE_TITLE = {"en": "The last steps of a training, --sync {sync}",
                  "ja": "訓練の最後の数ステップ（--sync {sync}）"}


def accuracy(net, images, labels):
    """The share of these images that the network, without dropout, takes for what they are."""
    net.eval()
    with torch.inference_mode():
        guesses = torch.cat([net(batch).argmax(1) for batch in images.split(500)])
    net.train()
    return (guesses == labels).double().mean().item()


def losses_of_ranks(loss, world_size, device):
    """The mean training loss of each rank in an epoch, on all ranks."""
    losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(world_size)]
    dist.all_gather(losses, torch.tensor(loss, dtype=torch.float64, device=device))
    losses = torch.stack(losses)
    return {"loss": losses.mean().item(), "loss_per_rank": losses.tolist()}


def require_equal_weights(net):
    """All ranks must hold bitwise identical weights.

    Raises:
        ArithmeticError: if they do not.
        NotFiniteError: if they are not numbers any more.
    """
    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    if not weights.isfinite().all():
        raise report.NotFiniteError("has weights that are not finite after the last step: training "
                                    "has diverged; give a smaller --lr")
    rank0s = weights.clone()
    dist.broadcast(rank0s, src=0)
    equal = torch.tensor(float(torch.equal(weights, rank0s)), device=weights.device)
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)  # 1 only if it is 1 everywhere
    if not equal:
        raise ArithmeticError("the replicas have drifted apart")


def log_epoch(epochs):
    """Print the line of the last epoch."""
    per_rank = " ".join(f"{loss:.3f}" for loss in epochs[-1]["loss_per_rank"])
    report.log("rank0", f"epoch {len(epochs):2}  test accuracy {epochs[-1]['accuracy']:.1%}  "
                        f"loss of each rank {per_rank}")


def record_steps(net, optimizer, average):
    """With --timeline, record when each step computes and when it communicates.

    Args:
        net: whose forward begins a step.
        optimizer: whose step ends it.
        average: the function that averages gradients, or None with DDP.

    Returns:
        A function like `average`, which is recorded, too.
    """
    if not timeline.is_on():
        return average
    since = {}

    def begin(*_):
        since["forward"] = time.time()

    def end_forward(*_):
        since["backward"] = time.time()
        timeline.add("forward", since["forward"], since["backward"])

    def begin_step(*_):
        since["step"] = time.time()
        if average is None:
            timeline.add("backward with all_reduce", since["backward"], since["step"])

    def end_step(*_):
        timeline.add("step", since["step"], time.time())

    def recorded(*args):
        timeline.add("backward", since["backward"], time.time())
        with timeline.span("all_reduce"):
            average(*args)

    net.register_forward_pre_hook(begin)
    net.register_forward_hook(end_forward)
    optimizer.register_step_pre_hook(begin_step)
    optimizer.register_step_post_hook(end_step)
    return average and recorded


def plot_timeline(of_each_rank, args):
    """Draw the last few steps of the training: `timeline.png`."""
    spans = {role: spans for of_rank in of_each_rank for role, spans in of_rank.items()}
    steps = [span for span in spans["rank0"] if span["kind"] == "step"][-STEPS_DRAWN - 1 :]
    if len(steps) > 1:  # otherwise there was nothing left to train
        title = {language: text.format(sync=args.sync) for language, text in TIMELINE_TITLE.items()}
        window = steps[0]["end"], steps[-1]["end"]
        timeline_report.save(spans, args.output_dir, title, {"": window}, report.machine(args))


def finish(metrics, args):
    """Write metrics.json, draw the timeline, print the last line; the whole metrics."""
    of_each_rank, samples, train_s = (metrics.pop(name) for name in ("spans", "samples", "train_s"))
    if args.timeline:
        plot_timeline(of_each_rank, args)
    metrics["samples_per_s"] = samples / train_s if samples else None
    metrics = report.save_metrics(args, metrics, metrics["backend"])
    speed = f"{metrics['samples_per_s']:.0f} samples/s" if samples else "nothing left to train"
    print(f"{args.dataset}: test accuracy {metrics['test_accuracy']:.1%} after {args.epochs} "
          f"epochs on {args.world_size} ranks, {args.sync}: {speed}, weights bitwise identical")
    return metrics
