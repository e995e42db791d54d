r"""DistributedDataParallel and RPC in one model: replicas of the dense part, one sparse part for all (tutorial 6_9).

A large embedding table stays on a parameter server, and trainers look up rows over RPC; the small layer on top of it is
replicated by DDP. One `dist_autograd.backward` runs both: DDP averages the layer's gradients among the trainers,
distributed autograd carries the others to the server.

    rank 2 "master"            rank 0 "trainer0"                        rank 3 "ps"
    +------------------+       +----------------------------+           +---------------------+
    | makes the table, | ----> | _run_trainer(emb_rref):    |  indices  | EmbeddingBag        |
    | starts the       |       |   emb_rref....forward()    | --------> |   the rows' sums    |
    | trainers, waits  |       |   DDP(Linear)         <------------------                     |
    |                  |       |   backward()               | --------> |   their gradients   |
    |                  |       |   opt.step()               | --------> |   SGD, one at a time|
    |                  |       +----------------------------+           |                     |
    |                  |          ^ all-reduce of the Linear's gradient |                     |
    |                  |          v rank 1 "trainer1"                   |                     |
    |                  | ----> [the same, with other batches]   <-----> |                     |
    +------------------+                                                +---------------------+

    python ddp_rpc_hybrid/main.py --world_size 4                 two trainers; N processes make N-2 trainers
    python ddp_rpc_hybrid/main.py --sparse --num_embeddings 1000000
    python ddp_rpc_hybrid/main.py --check                        the same numbers as a single process?
    torchrun --nproc_per_node 4 ddp_rpc_hybrid/main.py           under torchrun

Last line, about:
    2 trainers: loss 2.50 -> 0.60, accuracy 15% -> 82% (chance 12%) | 142 steps/s per trainer, 1.8 kB a step
"""

import itertools
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import report
from common.cli import Parser, bounded, on_cpu, ranks_here, require_memory
from common.launch import launch
from common.session import device_for, group_options, rpc_options, wait_all
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_rpc_hybrid.batches import BATCHES, Teacher, get_next_batch
from ddp_rpc_hybrid.single_process import steps_alone

PS_NAME, MASTER_NAME, TRAINER_NAME = "ps", "master", "trainer{}"
CHECK_STEPS = 3


def role_name(rank, world_size):
    """The last rank is the parameter server, the one before it the master, all others are trainers."""
    return {world_size - 1: PS_NAME, world_size - 2: MASTER_NAME}.get(rank, TRAINER_NAME.format(rank))


class SGD(optim.SGD):
    """The same, but `DistributedOptimizer` does not know it, and so makes its steps one after the other.

    What it knows it compiles to TorchScript: then two trainers' steps of the same table can run at the same time, both
    read the old value of an entry, and one of the two updates is lost.
    """


class HybridModel(nn.Module):
    """A sparse part on the parameter server, an EmbeddingBag, and a dense part on every trainer, a Linear in DDP."""

    def __init__(self, emb_rref, device, args):
        super().__init__()
        self.emb_rref = emb_rref
        torch.manual_seed(args.seed)  # the same weights on all trainers, whatever DDP does about it
        fc = nn.Linear(args.embedding_dim, args.num_classes).to(device)
        self.fc = DDP(fc, device_ids=[device] if device.type == "cuda" else None)
        self.device = device
        self.bytes_over_rpc = 0

    def forward(self, indices, offsets):
        """Bags of indices, the i-th from `offsets[i]` on, to scores (bags, classes)."""
        emb_lookup = self.emb_rref.rpc_sync().forward(indices, offsets)
        # What travels: the request, the bags' sums, and in the backward pass the gradient of these sums.
        self.bytes_over_rpc += indices.nbytes + offsets.nbytes + 2 * emb_lookup.nbytes
        return self.fc(emb_lookup.to(self.device))


def _retrieve_embedding_parameters(emb_rref):
    """On the server: an RRef for each parameter of the table, for the optimizer."""
    return [RRef(param) for param in emb_rref.local_value().parameters()]


def set_up(emb_rref, args):
    """On a trainer: the model, an optimizer for all its parameters, wherever they are, and the loss."""
    model = HybridModel(emb_rref, device_for(args.device), args)
    # Parameters on the server ...
    model_parameter_rrefs = rpc.rpc_sync(PS_NAME, _retrieve_embedding_parameters, args=(emb_rref,))
    # ... and here: model.parameters() knows only these.
    for param in model.parameters():
        model_parameter_rrefs.append(RRef(param))
    opt = DistributedOptimizer(SGD, model_parameter_rrefs, lr=args.lr)
    return model, opt, nn.CrossEntropyLoss()


def train_step(model, opt, criterion, indices, offsets, target):
    """One step of one trainer; its loss, and how many targets it would have guessed before the step."""
    with dist_autograd.context() as context_id:
        output = model(indices, offsets)
        target = target.to(output.device)
        loss = criterion(output, target)
        # In here: DDP averages the gradients of the dense part among the trainers, and the gradients of the sums go
        # over to the server, which makes those of the table.
        dist_autograd.backward(context_id, [loss])
        # The server steps the table, with this trainer's gradients; every trainer steps its replica of the dense part.
        opt.step(context_id)
        # No zero_grad(): the gradients were in this context, not in `.grad`, and go with it.
        return loss.item(), (output.argmax(dim=1) == target).sum().item()


def _run_trainer(emb_rref, rank, args):
    """On a trainer, called by the master: all epochs; losses and accuracies, seconds, and bytes."""
    model, opt, criterion = set_up(emb_rref, args)
    teacher, epochs, train_s = Teacher(args), [], 0.0
    with report.progress(args.epochs, "epoch", show=rank == 0) as bar:
        for epoch in range(args.epochs):
            batches = list(get_next_batch(rank, epoch, teacher, args))
            started, losses, guessed = time.perf_counter(), [], 0
            for batch in batches:
                loss, right = train_step(model, opt, criterion, *batch)
                losses.append(loss)
                guessed += right
            train_s += time.perf_counter() - started
            bags = sum(len(target) for _, _, target in batches)
            epochs.append({"loss": sum(losses) / len(losses), "accuracy": guessed / bags})
            bar.update()
            if rank == 0 and (epoch + 1) % 10 == 0:
                text = "epoch {:3}  loss {loss:.3f}  accuracy {accuracy:.0%}".format(epoch + 1, **epochs[-1])
                report.log(TRAINER_NAME.format(rank), text)
    steps = args.epochs * BATCHES
    n_trainers, dense_bytes = dist.get_world_size(), sum(param.nbytes for param in model.parameters())
    all_reduce_bytes = 2 * (n_trainers - 1) / n_trainers * dense_bytes  # what a ring sends
    return {"epochs": epochs, "steps_per_s": steps / train_s,
            "bytes_per_step": model.bytes_over_rpc / steps + all_reduce_bytes,
            "table_gradient_bytes": table_gradient_bytes(model, criterion, batches[-1])}


def table_gradient_bytes(model, criterion, batch):
    """How large the gradient is that one backward pass makes on the server."""
    indices, offsets, target = batch
    with dist_autograd.context() as context_id:
        output = model(indices, offsets)
        dist_autograd.backward(context_id, [criterion(output, target.to(output.device))])
        return rpc.rpc_sync(PS_NAME, _gradient_bytes, args=(model.emb_rref, context_id))


def _gradient_bytes(emb_rref, context_id):
    """On the server."""
    gradient = dist_autograd.get_gradients(context_id)[emb_rref.local_value().weight]
    return gradient._values().nbytes + gradient._indices().nbytes if gradient.is_sparse else gradient.nbytes


def on_all_trainers(function, world_size, args):
    """On the master: make the table, call `function(emb_rref, rank, args)` on all trainers, wait for their results."""
    emb_rref = rpc.remote(PS_NAME, nn.EmbeddingBag, args=(args.num_embeddings, args.embedding_dim),
                          kwargs={"mode": "sum", "sparse": args.sparse})
    futs = []
    for trainer_rank in range(world_size - 2):
        # No timeout: this one call lasts as long as the training.
        futs.append(rpc.rpc_async(TRAINER_NAME.format(trainer_rank), function, args=(emb_rref, trainer_rank, args),
                                  timeout=0))
    return wait_all(futs)  # raises as soon as one of them fails, even if the others wait for that one


def run_worker(rank, world_size, args):
    """The master lets the trainers train and returns the metrics; the others do what they are asked."""
    trainers = run_role(rank, world_size, args, _run_trainer)
    if trainers is None:
        return None
    epochs = [{key: sum(epoch[key] for epoch in same) / len(same) for key in ("loss", "accuracy")}
              for same in zip(*(trainer["epochs"] for trainer in trainers), strict=True)]
    means = {key: sum(trainer[key] for trainer in trainers) / len(trainers)
             for key in ("steps_per_s", "bytes_per_step", "table_gradient_bytes")}
    return {"epochs": epochs, **means}


def run_role(rank, world_size, args, function):
    """Everybody joins the RPC world, the trainers also a process group, for DDP, and does what the role asks for.

    Returns:
        On the master, what `function(emb_rref, rank, args)` returned on each trainer; elsewhere None.
    """
    torch.manual_seed(args.seed)  # on the server: that of the table
    n_trainers, results = world_size - 2, None
    if rank < n_trainers:
        dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank, world_size=n_trainers)
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size, rpc_backend_options=rpc_options(args))
    if role_name(rank, world_size) == MASTER_NAME:
        results = on_all_trainers(function, world_size, args)
    rpc.shutdown()  # waits for everyone: until then, trainers and server do what they are asked
    if rank < n_trainers:
        dist.destroy_process_group()
    return results


def record_steps(emb_rref, rank, args):
    """For `check`, on a trainer: what a few steps make of the dense part and of the table, step by step."""
    model, opt, criterion = set_up(emb_rref, args)
    dense, tables, changes, before = [], [], [], table_of(emb_rref)
    for of_all_trainers in batches_for_check(args):
        dist.barrier()  # all have seen the table as it is
        train_step(model, opt, criterion, *of_all_trainers[rank])
        dist.barrier()  # all have made their step
        dense.append(torch.cat([param.detach().flatten().cpu() for param in model.parameters()]).tolist())
        after = table_of(emb_rref)
        looked_up = torch.cat([indices for indices, _, _ in of_all_trainers]).unique()
        others = torch.ones(len(after), dtype=torch.bool).index_fill(0, looked_up, False)
        tables.append(after[looked_up].flatten().tolist())
        changes.append(int((after != before)[others].sum()))
        before = after
    return {"dense": dense, "tables": tables, "changes": changes}


def batches_for_check(args):
    """For each of the first steps, the batch of each trainer."""
    teacher = Teacher(args)
    of_each_trainer = [get_next_batch(rank, 0, teacher, args) for rank in range(args.world_size - 2)]
    return list(itertools.islice(zip(*of_each_trainer, strict=True), CHECK_STEPS))


def table_of(emb_rref):
    """The table as it is on the server now: shape (rows, dimension)."""
    return emb_rref.rpc_sync().state_dict()["weight"]


def record(rank, world_size, args):
    """For `check`: the master returns what the trainers have recorded."""
    trainers = run_role(rank, world_size, args, record_steps)
    return trainers and {"trainers": trainers}


def check(args):
    """Hold a few steps against a single process; the differences, or None where nothing is reported."""
    recorded = launch(record, args, role_name)
    if recorded is None:
        return None
    trainers = recorded["trainers"]
    first = trainers[0]
    alone, share = steps_alone(batches_for_check(args), args)
    report.log("check", f"one process that averages the loss over the joined batch would move the table {share:.2f} "
                        "times as far: here every trainer makes a whole step of its own")
    ours = {"replicas of the dense part": [trainer["dense"] for trainer in trainers], "dense part": first["dense"],
            "entries that changed in rows that nobody looked up": first["changes"]}
    oracle = {"replicas of the dense part": [first["dense"] for _ in trainers], "dense part": alone["dense"],
              "entries that changed in rows that nobody looked up": [0] * len(first["changes"])}
    tolerances = {"replicas of the dense part": 0, "dense part": 1e-5,
                  "entries that changed in rows that nobody looked up": 0}
    for step, (table, by_oracle) in enumerate(zip(first["tables"], alone["tables"], strict=True), start=1):
        what = f"looked-up rows after step {step}"
        # The trainers' steps come in any order, and each is rounded: float32, a few 1e-7 of the largest entry.
        ours[what], oracle[what], tolerances[what] = table, by_oracle, 1e-5
    return report.compare(ours, oracle, tolerances)


def plot(metrics, args):
    """Draw `loss.png`."""
    title = f"DDP and RPC in one model: {args.world_size - 2} trainers, one table of {args.num_embeddings} rows"
    with report.picture(args.output_dir / "loss.png", title, "epoch", "loss (nats)") as axes:
        epochs = range(1, len(metrics["epochs"]) + 1)
        axes.plot(epochs, [epoch["loss"] for epoch in metrics["epochs"]], color="C0", label="loss (left)")
        right = axes.twinx()
        right.plot(epochs, [epoch["accuracy"] for epoch in metrics["epochs"]], color="C1", label="accuracy (right)")
        right.axhline(1 / args.num_classes, color="C1", linestyle="--", label="chance (right)")
        right.set_ylim(0, 1)
        right.set_ylabel("accuracy on new batches")
        right.spines["top"].set_visible(False)


def build_parser():
    """The flags of this example."""
    parser = Parser("ddp_rpc_hybrid", __doc__, world_size=4, min_world_size=3)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--epochs", type=count, default=100, metavar="N", help=f"of {BATCHES} batches of each trainer")
    add("--num_embeddings", type=count, default=100, metavar="N", help="rows of the table")
    add("--embedding_dim", type=count, default=16, metavar="N", help="numbers in a row")
    add("--num_classes", type=bounded(int, at_least=2), default=8, metavar="N", help="what the dense part tells apart")
    add("--lr", type=bounded(float, above=0), default=0.2, help="learning rate of SGD")
    add("--sparse", action="store_true", help="the table's gradient holds only the rows that were looked up")
    return parser


def require_tables(args):
    """Refuse a table and a dense part that this machine cannot hold."""
    table, dense = (4 * n * args.embedding_dim for n in (args.num_embeddings, args.num_classes))
    n_bytes = 0
    for rank in ranks_here(args):
        role = role_name(rank, args.world_size)
        if role == PS_NAME:
            n_bytes += table if args.sparse else 2 * table  # the gradient has all rows
        elif role != MASTER_NAME:
            # The teacher's own two; the weights, and on a CPU their gradient.
            n_bytes += table + (3 if on_cpu(args) else 2) * dense
    require_memory(args, ["num_embeddings", "embedding_dim", "num_classes"], n_bytes)


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = build_parser().parse_args(argv)
    require_tables(args)
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    first, last = metrics["epochs"][0], metrics["epochs"][-1]
    trainers = "1 trainer" if args.world_size == 3 else f"{args.world_size - 2} trainers"
    print(f"{trainers}: loss {first['loss']:.2f} -> {last['loss']:.2f}, accuracy {first['accuracy']:.0%} -> "
          f"{last['accuracy']:.0%} (chance {1 / args.num_classes:.0%}) | {metrics['steps_per_s']:.0f} steps/s per "
          f"trainer, {metrics['bytes_per_step'] / 1000:.1f} kB a step")
    return metrics


if __name__ == "__main__":
    main()
