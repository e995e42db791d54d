"""Where does each millisecond of a step of rpc_rnn go?

Models train in turns, a few steps each, within one run: a noisy machine cannot favour one.

    this lesson    rref.rpc_sync().forward(...)
    prefetch       step, and look-up of the next piece, in one RPC (rpc_rnn/prefetch.py)

and the first one once more with a clock between the parts of a step. The oracle's steps, without
RPC, are the floor.

    python -m benchmarks.rpc_rnn --rounds 30
"""

import itertools
import random
import statistics
import time

import torch.distributed.autograd as dist_autograd
from common import report
from common.cli import bounded, refuse
from common.launcher import launch
from common.session import rpc_options
from torch import nn
from torch.distributed import rpc

from rpc_rnn import main as lesson
from rpc_rnn import prefetch
from rpc_rnn.data import columns, get_next_batch, load_language, require_inputs
from rpc_rnn.saving import LocalRNNModel, require_checkpoint

LESSON, PREFETCH, LOCAL = "this lesson", "prefetch", "one process, no RPC"
PARTS = ("embedding RPC", "LSTM", "decoder RPC", "loss", "backward", "optimizer step",
         "end of the context")


def remote_step(model, opt, criterion, data, target, hidden):
    """A step as in the loop of `run_trainer`."""
    with dist_autograd.context() as context_id:
        output, _ = model(data, hidden)
        loss = criterion(output.flatten(0, 1), target.flatten())
        dist_autograd.backward(context_id, [loss])
        opt.step(context_id)


def timed_step(model, opt, criterion, data, target, hidden):
    """`remote_step` with a clock between its parts; milliseconds of each, in the order of PARTS."""
    clock = [time.perf_counter()]

    def tick():
        clock.append(time.perf_counter())

    with dist_autograd.context() as context_id:
        emb = model.emb_table_rref.rpc_sync().forward(data)
        tick()
        output, _ = model.rnn(emb, hidden)
        tick()
        decoded = model.decoder_rref.rpc_sync().forward(output)
        tick()
        loss = criterion(decoded.flatten(0, 1), target.flatten())
        tick()
        dist_autograd.backward(context_id, [loss])
        tick()
        opt.step(context_id)
        tick()
    tick()
    return [1000 * (after - before) for before, after in itertools.pairwise(clock)]


def local_step(model, optimizer, criterion, data, target, hidden):
    """The same step without RPC."""
    output, _ = model(data, hidden)
    loss = criterion(output.flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def run_worker(rank, world_size, args):
    """The trainer measures; the server answers."""
    rpc.init_rpc(lesson.role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, lesson.RPC_THREADS))
    metrics = measure(args) if rank != 0 else None
    rpc.shutdown()
    return metrics


def measure(args):
    """What `run_worker` returns."""
    language = load_language(args)
    sizes = (language.ntoken, args.ninp, args.nhid, args.nlayers, args.dropout, args.seed)
    ours, ahead = (model_class("ps", *sizes, args.device)
                   for model_class in (lesson.RNNModel, prefetch.PrefetchingModel))
    local, criterion = LocalRNNModel(*sizes[:4]), nn.CrossEntropyLoss()
    alone = lesson.Adam(local.parameters(), lr=args.lr)
    opt = ours.make_optimizer(args)
    # A step as one call of (data, target, hidden), for each way to make one; what it reads.
    ways = {LESSON: (remote_step, ours, opt, get_next_batch),
            PREFETCH: (remote_step, ahead, ahead.make_optimizer(args), prefetch.get_next_batch),
            LOCAL: (local_step, local, alone, get_next_batch),
            "parts": (timed_step, ours, opt, get_next_batch)}
    text = columns(language.train, args.batch_size, 0, 1)[: args.steps * args.bptt + 1]
    hidden, times, parts = ours.init_hidden(args.batch_size), {name: [] for name in ways}, []
    for turn in range(args.rounds + 1):
        # In another order each time: nobody profits from being the first.
        for name in random.Random(turn).sample(list(ways), len(ways)):
            step, model, optimizer, read = ways[name]
            started = time.perf_counter()
            results = [step(model, optimizer, criterion, *piece, hidden)
                       for piece in read(text, args.bptt)]
            times[name].append(1000 * (time.perf_counter() - started) / len(results))
            if name == "parts" and turn > 0:  # the first turn is for warming up
                parts += results
    medians = map(statistics.median, zip(*parts, strict=True))
    ms = {name: statistics.median(times[name][1:]) for name in ways if name != "parts"}
    return {"ms_per_step": ms, "parts_ms": dict(zip(PARTS, medians, strict=True)),
            "prefetch_ratio": ms[LESSON] / ms[PREFETCH]}


def build_parser():
    """The flags of rpc_rnn, whose steps are timed, and how long."""
    parser, count = lesson.build_parser("benchmark_rpc_rnn", __doc__), bounded(int, at_least=1)
    parser.add_argument("--rounds", type=count, default=30, metavar="N", help="turns of each model")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="steps in a turn")
    return parser


def main(argv=None):
    """Print the tables and write metrics.json."""
    args = build_parser().parse_args(argv)
    require_checkpoint(args, require_inputs(args))
    if args.world_size != 2:
        refuse(f"--world_size {args.world_size} must be 2: a server and one trainer are timed")
    metrics = launch(run_worker, args, lesson.role_name)
    if metrics is None:
        return None
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    print(f"{'':20} ms a step   steps/s   (medians of {args.rounds} turns of {args.steps} steps)")
    for name, ms in metrics["ms_per_step"].items():
        print(f"{name:20} {ms:9.2f} {1000 / ms:9.0f}")
    print(f"prefetch makes {metrics['prefetch_ratio']:.2f} times the steps/s")
    total = sum(metrics["parts_ms"].values())
    print(f"\n{'part':20} {'ms':>9}   share")
    for name, ms in metrics["parts_ms"].items():
        print(f"{name:20} {ms:9.2f} {ms / total:7.0%}")
    return metrics


if __name__ == "__main__":
    main()
