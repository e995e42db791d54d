"""The oracle of `sharded_table.py`: every number of every step, held against one process.

That process has the whole table. It takes the gradients of all trainers' losses on the same
weights, adds up those of the table, averages those of the dense part, and makes one step. The
lesson trains with each way of exchange, with dense and with sparse gradients, on a table that the
trainers cannot divide evenly, and on one of which the last trainer owns nothing; in the first epoch
all rows that are looked up are the first trainer's (sharded_table_recording.py). All in float64.
"""

import copy
import math
from argparse import Namespace
from statistics import fmean

import torch
from common.launcher import launch
from common.oracle import Comparison, by_rank, verdict
from torch import nn

from ddp_rpc_hybrid.check import batches_of, forward_and_backward, teacher_of
from ddp_rpc_hybrid.check_metrics import epochs_of, hold_speed
from ddp_rpc_hybrid.sharded_table_recording import LOCAL_EPOCH, record_trainings, trainings_of

EPOCHS = 2
MOST_ROWS = 1000  # of the table in a check: all of it is kept after each step
TOLERANCE = 1e-9
WHY = "float64, whose sums may come in another order"
COMPARED = (  # of each step: what, the tolerance, and why
    ("indices", 0.0, "batches of its own for each trainer and epoch"),
    ("offsets", 0.0, "where the bags begin"),
    ("target", 0.0, "the teacher's classes"),
    ("asked", 0.0, "every index comes to the owner of its row, once"),
    ("sums", TOLERANCE, WHY),
    ("loss", TOLERANCE, WHY),
    ("dense gradient", TOLERANCE, "float64; DDP averages over the trainers"),
    ("table gradient", TOLERANCE, "float64; the sum over the trainers, of the rows of each owner"),
    ("dense", TOLERANCE, "weights after the step"),
    ("table", TOLERANCE, "rows of each owner after the step"),
    ("sent", TOLERANCE, "bytes to other ranks, counted from indices and bags"),
)


def single_process(args):
    """Train as all trainers together should have done.

    Args:
        args: the flags of one training.

    Returns:
        For each rank what it should have at first, and its steps, as its recorder has them; for
        each step of all the bags: the trainers' `forward_and_backward`.
    """
    ranks, part = range(args.world_size), rows_each(args)
    torch.manual_seed(args.seed)
    table = nn.init.normal_(torch.empty(args.num_embeddings, args.embedding_dim))
    torch.manual_seed(args.seed)
    dense = nn.Linear(args.embedding_dim, args.num_classes)
    owned = [slice(rank * part, (rank + 1) * part) for rank in ranks]
    classes_of, steps, alone = teacher_of(args), [[] for _ in ranks], []
    first = [{"table": table[rows].clone(), "dense": copy.deepcopy(dense.state_dict())}
             for rows in owned]
    for epoch in range(args.epochs):
        drawn_from = part if epoch == LOCAL_EPOCH else args.num_embeddings
        drawing = Namespace(**{**vars(args), "num_embeddings": drawn_from})
        of_trainers = (batches_of(rank, epoch, drawing) for rank in ranks)
        for batches in zip(*of_trainers, strict=True):
            of_all, of_dense = zip(*(
                forward_and_backward(dense, bags, sums_of(bags, table), classes_of(bags))
                for bags in batches), strict=True)
            total = torch.zeros_like(table)
            for step in of_all:
                total[step["table gradient"]["rows"]] += step["table gradient"]["entries"]
            table -= args.lr * total
            average = {name: sum(gradient[name] for gradient in of_dense) / args.world_size
                       for name in ("weight", "bias")}
            with torch.no_grad():
                for name, param in dense.named_parameters():
                    param -= args.lr * average[name]
            for rank, rows in enumerate(owned):
                steps[rank].append({
                    **of_all[rank], "sums": of_all[rank]["lookup"], "asked": asked_of(rows, of_all),
                    "dense gradient": average, "table gradient": total[rows].clone(),
                    "dense": copy.deepcopy(dense.state_dict()), "table": table[rows].clone(),
                    "sent": messages_of(rank, of_all, args)})
            alone.append(of_all)
    return first, steps, alone


def rows_each(args):
    """How many rows an owner has, if so many are left: their share, rounded up."""
    return math.ceil(args.num_embeddings / args.world_size)


def sums_of(bags, table):
    """The sum of the rows of each bag: shape (bags, embedding_dim)."""
    return torch.stack([sum(table[index] for index in bag) for bag in bags])


def asked_of(rows, of_all):
    """The rows that all trainers look up at their owner, in order, each as often as in the bags."""
    indices = torch.cat([step["indices"] for step in of_all])
    return indices[(indices >= rows.start) & (indices < rows.stop)].sort().values


def messages_of(rank, of_all, args):
    """The bytes that a rank should send to the others in a step, by collective.

    An integer or a number of float64 has 8 bytes. What all ranks have alike goes round in rings.
    """
    n, dim = args.world_size, args.embedding_dim
    n_bags = [len(step["offsets"]) for step in of_all]
    dense = args.num_classes * (dim + 1)
    if args.exchange == "all_to_all":
        owners = of_all[rank]["indices"] // rows_each(args)
        counts, questions = 2 * (n - 1), 2 * (owners != rank).sum().item()
        answers, gradients = (sum(n_bags) - n_bags[rank]) * dim, (n - 1) * n_bags[rank] * dim
        return {"alltoall_base_": 8 * (counts + questions + answers + gradients),
                "allreduce_": 8 * 2 * (n - 1) / n * dense}
    longest = max(len(step["indices"]) for step in of_all)
    rows = 8 * (n - 1) * longest * dim
    of_dtensor = {"reduce_scatter_tensor": rows, "all_gather_into_tensor": rows} if n > 1 else {}
    return {"allreduce_": 8 * 2 * (n - 1) / n * (1 + dense), "allgather_": 8 * (n - 1) * longest,
            **of_dtensor}


def compare(reported, everyone, args):
    """The findings as a dict, on rank 0; `everyone` has what all ranks have recorded."""
    findings = Comparison(f"{args.world_size} processes")
    for training, flags in trainings_of(args).items():
        of_ranks = [of_rank[training] for of_rank in everyone]
        first, steps, alone = single_process(flags)
        ours = [of_rank["steps"] for of_rank in of_ranks]
        rows = [of_rank["first"].get("table", []) for of_rank in of_ranks]
        findings.equal(f"{training}, first weights", [of_rank["first"] for of_rank in of_ranks],
                       first, "each row is on one rank, and the dense part on all", "rank")
        findings.holds(f"{training}, owners", sum(map(len, rows)) == flags.num_embeddings,
                       f"{' + '.join(str(len(part)) for part in rows)} rows of "
                       f"{flags.num_embeddings}, each with one owner")
        for name, tolerance, because in COMPARED:
            if flags.exchange == "all_to_all" or name != "asked":
                findings.close(f"{training}, {name}", by_rank(ours, name), by_rank(steps, name),
                               tolerance, because)
        replicas = by_rank(ours, "dense")
        findings.equal(f"{training}, replicas of the dense part", replicas,
                       [dict.fromkeys(step, step["rank 0"]) for step in replicas],
                       "DDP gives the same gradients to all")
        hold_reported(findings, training, reported[training], alone, steps, flags)
        hold_speed(findings, reported[training], of_ranks,
                   f"{training}, reported steps per second")
    return findings.as_dict()


def hold_reported(findings, training, metrics, alone, steps, args):
    """Hold the metrics of a training against what one process has counted."""
    findings.close(f"{training}, reported loss and accuracy", metrics["epochs"], epochs_of(alone),
                   TOLERANCE, WHY, "epoch")
    part, row = rows_each(args), 8 * args.embedding_dim
    last = max(len(of_rank[-1]["asked"]) for of_rank in steps)
    gradient = {"dtensor": args.num_embeddings * row}.get(args.exchange, part * row)
    expected = {"bytes_per_step": fmean(sum(step["sent"].values())
                                        for of_rank in steps for step in of_rank),
                "table_bytes": part * row,
                "table_gradient_bytes": last * (row + 8) if args.sparse else gradient}
    for key, number in expected.items():
        findings.close(f"{training}, reported {key}", [metrics[key]], [number], TOLERANCE,
                       "counted from indices, bags and rows", "run")


def record(rank, world_size, args):
    """Run the lesson, recorded; rank 0 returns the findings."""
    reported, everyone = record_trainings(rank, world_size, args)
    return compare(reported, everyone, args) if rank == 0 else None


def check(program, args):
    """Print what was compared; `{what: difference}` where it is reported, None elsewhere."""
    args.epochs, args.num_embeddings = EPOCHS, min(args.num_embeddings, MOST_ROWS)
    return verdict(launch(record, args, program.role_name))
