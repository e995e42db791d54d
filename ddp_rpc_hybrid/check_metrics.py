"""What the run of a `--check` reports: its epochs, the bytes that travel, the steps per second."""

from statistics import fmean

from ddp_rpc_hybrid.recording import STEPS


def hold_metrics(close, metrics, alone, args):
    """Hold the epochs and the bytes against the steps of one process.

    Args:
        close: `Comparison.close`, with a tolerance.
        metrics: of the run.
        alone: for each step and trainer what one process has computed; see `single_process`.
        args: the parsed flags.
    """
    close("metrics, loss and accuracy", metrics["epochs"], epochs_of(alone), unit="epoch")
    n_trainers, dim = len(alone[0]), args.embedding_dim
    # The request, the sums of the bags, and on the way back their gradient.
    over_rpc = fmean(len(step["indices"]) + len(step["offsets"]) * (1 + 2 * dim)
                     for steps in alone for step in steps)
    all_reduced = 2 * (n_trainers - 1) / n_trainers * args.num_classes * (dim + 1)
    gradient = fmean(len(step["indices"]) * (1 + dim) if args.sparse else args.num_embeddings * dim
                     for step in alone[-1])
    for key, numbers in (("bytes_per_step", over_rpc + all_reduced),
                         ("table_gradient_bytes", gradient)):
        close(f"metrics, {key}", [metrics[key]], [8 * numbers],  # a float64 or an index has 8 bytes
              because="counted from indices and bags", unit="run")


def epochs_of(alone):
    """The loss and the accuracy of each epoch, means over the trainers; see `hold_metrics`."""
    epochs = []
    for start in range(0, len(alone), STEPS):
        losses, shares = [], []
        for steps in zip(*alone[start : start + STEPS], strict=True):  # of one trainer
            losses.append(fmean(step["loss"] for step in steps))
            bags = sum(len(step["target"]) for step in steps)
            shares.append(sum(step["correct"] for step in steps) / bags)
        epochs.append({"loss": fmean(losses), "accuracy": fmean(shares)})
    return epochs


def hold_speed(found, metrics, trainers, what="metrics, steps per second"):
    """Hold the steps per second against the times at which the steps began and ended.

    Args:
        found: the `Comparison`.
        metrics: of the run.
        trainers: what each trainer has recorded.
        what: the name of it.
    """
    measured = []
    for trainer in trainers:
        spans = [step["span"] for step in trainer["steps"] if "span" in step]
        if not spans:
            found.holds(what, False, "a trainer has made no step")
            return
        epochs = [spans[start : start + STEPS] for start in range(0, len(spans), STEPS)]
        measured.append(len(spans) / sum(epoch[-1][1] - epoch[0][0] for epoch in epochs))
    ratio = metrics["steps_per_s"] / fmean(measured)
    found.holds(what, 0.6 < ratio < 1.01,
                f"{ratio:.2f} of those between the first and the last step of each epoch, 0.6 to "
                "1.01 expected: no start, no making of batches")
