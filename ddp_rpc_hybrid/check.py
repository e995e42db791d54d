"""The oracle of `main.py --check`: the lesson's own training, held against a program of one process.

The lesson's `run_worker` trains four short epochs in its own processes while hooks record what each trainer reads and
computes, and on the server each step of the table. `single_process` knows only the flags. It has its own batches,
targets and loop, and ordinary autograd. Two halves:

    epochs 1, 2   in lockstep: after each step the trainers wait for each other. All lookups find the same table, and
                  every number follows: one process takes the sum of the trainers' steps of the table.
    epochs 3, 4   free, as in any training: a lookup may find the table before or after a neighbour's step. So the
                  oracle takes the looked-up rows as they were; all else follows from them, and each step of the table
                  must have arrived on the server once: the table at the end is that of the start plus all of them.

Both compute in float64, so that a mistake cannot hide behind rounding.
"""

import contextlib
import copy
import random
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common.launch import launch
from common.oracle import Comparison, verdict
from torch import nn
from torch.distributed import rpc
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_rpc_hybrid import main as lesson
from ddp_rpc_hybrid import results

LOCKSTEP_EPOCHS, EPOCHS = 2, 4
STEPS = 10  # of a trainer in an epoch
TOLERANCE = 1e-9
BECAUSE = "float64, whose sums may come in another order"
BATCHES_S = 0.5  # that making an epoch's batches is made to last: the time of the training must not have it
STEP_S = 0.002  # that each step of the table is made to last, so that two would overlap


# --- the lesson's run, recorded

_run_trainer, _table_gradient_bytes, _get_next_batch = (
    lesson._run_trainer, results.table_gradient_bytes, lesson.get_next_batch)
_delivered, _arrived = {}, threading.Condition()  # on the master: what the others have recorded


class Server:
    """On the parameter server: each step of the table, seen by PyTorch's own hooks of optimizers."""

    def __init__(self):
        self.updates, self.active, self.overlaps, self.before = [], 0, 0, None

    @contextlib.contextmanager
    def installed(self):
        """Record what happens inside."""
        hooks = [register_optimizer_step_pre_hook(self.begins), register_optimizer_step_post_hook(self.ends)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begins(self, optimizer, *_):
        """An optimizer is about to step."""
        self.active += 1
        self.overlaps += self.active > 1
        time.sleep(STEP_S)

    def ends(self, optimizer, *_):
        """It has."""
        self.active -= 1
        self.updates.append(rows_of(optimizer.param_groups[0]["params"][0].grad))


_server = Server()


def rows_of(gradient):
    """Only the rows that are not zero: their numbers and their entries."""
    numbers, entries = torch.arange(len(gradient)), gradient.detach()
    if gradient.is_sparse:
        entries = gradient.coalesce()
        numbers, entries = entries.indices()[0], entries.values()
    some = entries.any(dim=1)
    return {"rows": numbers[some], "entries": entries[some]}


def _table_gradient(emb_rref, context_id):
    """On the server: that of one trainer's step."""
    gradient = dist_autograd.get_gradients(context_id).get(emb_rref.local_value().weight)
    return {} if gradient is None else rows_of(gradient)


def _table_change(emb_rref):
    """On the server: the rows that have changed since the last call, as they are now; at first all."""
    now = emb_rref.local_value().weight.detach()
    before, _server.before = _server.before, now.clone()
    rows = torch.arange(len(now)) if before is None else (now != before).any(dim=1).nonzero().flatten()
    return {"rows": rows, "entries": now[rows].clone()}


def _updates():
    """On the server: what the hooks have seen."""
    return {"updates": _server.updates, "overlaps": _server.overlaps}


def deliver(rank, recorded):
    """On the master: take what a trainer has recorded."""
    with _arrived:
        _delivered[rank] = recorded
        _arrived.notify_all()


class Trainer:
    """On a trainer: a dict for each step, with what it has read, looked up, computed, and what it has now."""

    def __init__(self, emb_rref, rank):
        self.emb_rref, self.rank, self.steps, self.off, self.dense = emb_rref, rank, [], False, None

    @contextlib.contextmanager
    def installed(self):
        """Record what happens inside."""
        recorder = self

        class Context(dist_autograd.context):
            def __enter__(self):
                self.started, self.id = time.perf_counter(), super().__enter__()
                return self.id

            def __exit__(self, *error):
                if error[0] is None and not recorder.off:
                    recorder.after_a_step(self.id, self.started)
                super().__exit__(*error)

        def gradient_bytes(model, criterion, batch):
            self.off = True  # one more backward pass, which is no step
            return _table_gradient_bytes(model, criterion, batch)

        def slow_batches(*args):
            time.sleep(BATCHES_S)
            return _get_next_batch(*args)

        hook = nn.modules.module.register_module_forward_hook(self.after_a_module)
        with contextlib.ExitStack() as replaced:
            replaced.callback(hook.remove)
            for owner, name, value in ((dist_autograd, "context", Context), (lesson, "get_next_batch", slow_batches),
                                       (results, "table_gradient_bytes", gradient_bytes)):
                replaced.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield

    def after_a_module(self, module, inputs, output):
        """Of the modules of a step, the first to end is the dense part, the last one the loss."""
        if self.off:
            return
        if isinstance(module, nn.Linear):
            if self.dense is None:
                self.dense = module
                self.first = self.dense_part(), self.table_change()
            self.steps.append({"lookup": inputs[0].detach().cpu().clone()})
        elif isinstance(module, lesson.HybridModel):
            self.steps[-1] |= {"indices": inputs[0].clone(), "offsets": inputs[1].clone()}
        elif isinstance(module, nn.CrossEntropyLoss):
            self.steps[-1] |= {"target": inputs[1].cpu().clone(), "loss": output.item()}

    def after_a_step(self, context_id, started):
        """What the step has left behind."""
        ended, of_context = time.perf_counter(), dist_autograd.get_gradients(context_id)
        step = self.steps[-1]
        step["span"] = started, ended
        step["dense gradient"] = {name: of_context[param].cpu().clone() for name, param in
                                  self.dense.named_parameters() if param in of_context}
        step["table gradient"] = rpc.rpc_sync("ps", _table_gradient, args=(self.emb_rref, context_id))
        step["dense"] = self.dense_part()
        if len(self.steps) <= LOCKSTEP_EPOCHS * STEPS:
            dist.barrier()  # all have made their step
            step["table"] = self.table_change()
            dist.barrier()  # all have seen it

    def dense_part(self):
        """Its weights."""
        return {name: param.detach().cpu().clone() for name, param in self.dense.named_parameters()}

    def table_change(self):
        """The rows of the table that have changed: the first trainer asks for them."""
        return rpc.rpc_sync("ps", _table_change, args=(self.emb_rref,)) if dist.get_rank() == 0 else {}


def run_trainer(emb_rref, rank, args):
    """`_run_trainer`, recorded, with the same arguments and the same result."""
    recorder = Trainer(emb_rref, rank)
    with recorder.installed():
        metrics = _run_trainer(emb_rref, rank, args)
    dist.barrier()  # no step of the table is on its way any more
    recorded = {"steps": recorder.steps, "first": recorder.first, "metrics": metrics, "change": recorder.table_change(),
                "server": rpc.rpc_sync("ps", _updates) if dist.get_rank() == 0 else None}
    rpc.rpc_sync("master", deliver, args=(dist.get_rank(), recorded))
    return metrics


def record(rank, world_size, args):
    """Run the lesson's worker and record it; the master returns the findings."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    lesson._run_trainer = run_trainer  # what the master calls on the trainers
    _delivered.clear()
    server = lesson.role_name(rank, world_size) == "ps"
    try:
        with _server.installed() if server else contextlib.nullcontext():
            metrics = lesson.run_worker(rank, world_size, args)
        if lesson.role_name(rank, world_size) != "master":
            return None
        return compare([_delivered[rank] for rank in range(world_size - 2)], metrics, args).as_dict()
    finally:
        lesson._run_trainer = _run_trainer
        torch.set_default_dtype(before)


# --- one process


def batches_of(rank, epoch, args):
    """The batches of one trainer in one epoch: lists of bags, each a list of indices."""
    seed = 1_000_000 * args.seed + 1000 * epoch + rank
    lengths, drawn = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        n = lengths.randint(20, 50)
        left = torch.randint(args.num_embeddings, (n,), generator=drawn).tolist()
        bags = []
        while left:
            size = lengths.randint(1, 10)
            bags.append(left[:size])
            left = left[size:]
        yield bags


def single_process(args, looked_up):
    """Train as all trainers together should have done.

    Args:
        args: the flags.
        looked_up: for each step and trainer, the sums of the bags that it has got; used after the lockstep.

    Returns:
        The first dense part and table, a dict for each step, with an entry for each trainer where they differ, the
        table in the end, how many times the targets were guessed, and the bytes of a gradient of the table.
    """
    n_trainers, rows, dim, classes = args.world_size - 2, args.num_embeddings, args.embedding_dim, args.num_classes
    numbers = torch.Generator().manual_seed(10_000 + args.seed)
    secret_table = torch.randn(rows, dim, generator=numbers, dtype=torch.float32)
    secret_weight = torch.randn(classes, dim, generator=numbers, dtype=torch.float32)
    torch.manual_seed(args.seed)
    whole_table = torch.nn.init.normal_(torch.empty(rows, dim))
    torch.manual_seed(args.seed)
    dense = nn.Linear(dim, classes)
    first = {name: param.detach().clone() for name, param in dense.named_parameters()}
    first = first, whole_table.clone()
    # Of a large table, only the rows that are looked up: `place` says where.
    used = sorted({index for rank in range(n_trainers) for epoch in range(args.epochs)
                   for bags in batches_of(rank, epoch, args) for bag in bags for index in bag})
    place, used = {index: i for i, index in enumerate(used)}, torch.tensor(used)
    table = whole_table[used].requires_grad_()
    steps, correct = [], []
    for epoch in range(args.epochs):
        for batches in zip(*(batches_of(rank, epoch, args) for rank in range(n_trainers)), strict=True):
            keys = ("indices", "offsets", "target", "lookup", "loss", "table gradient")
            step, losses, right = {key: [] for key in keys}, [], []
            for rank, bags in enumerate(batches):
                secret_scores = torch.stack([secret_table[bag].sum(dim=0) for bag in bags]) @ secret_weight.T
                target = secret_scores.argmax(dim=1)
                starts, sums = [sum(map(len, bags[:i])) for i in range(len(bags))], []
                for bag in bags:
                    sums.append(table[[place[index] for index in bag]].sum(dim=0))
                ours = torch.stack(sums)
                seen = looked_up[len(steps)][rank] if len(steps) < len(looked_up) else None
                if epoch >= LOCKSTEP_EPOCHS and seen is not None and seen.shape == ours.shape:
                    ours = ours + (seen - ours).detach()  # the values that the trainer has got, and our gradient
                scores = dense(ours)
                losses.append(-torch.log_softmax(scores, dim=1)[torch.arange(len(bags)), target].mean())
                right.append((int((scores.argmax(dim=1) == target).sum()), len(bags)))
                of_rows = rows_of(torch.autograd.grad(losses[-1], table, retain_graph=True)[0])
                step["table gradient"].append({**of_rows, "rows": used[of_rows["rows"]]})
                step["indices"].append(torch.tensor([index for bag in bags for index in bag]))
                step["offsets"].append(torch.tensor(starts))
                step["target"].append(target)
                step["lookup"].append(ours.detach())
                step["loss"].append(losses[-1].item())
            gradients = torch.autograd.grad(sum(losses) / n_trainers, list(dense.parameters()), retain_graph=True)
            table_gradient = torch.autograd.grad(sum(losses), table)[0]
            before = table.detach().clone()
            with torch.no_grad():
                for param, gradient in zip(dense.parameters(), gradients, strict=True):
                    param -= args.lr * gradient
                table -= args.lr * table_gradient  # the sum: each trainer makes a whole step
            changed = (table.detach() != before).any(dim=1).nonzero().flatten()
            step["dense gradient"] = dict(zip(("weight", "bias"), gradients, strict=True))
            step["dense"] = {name: param.detach().clone() for name, param in dense.named_parameters()}
            step["table"] = {"rows": used[changed], "entries": table.detach()[changed].clone()}
            steps.append(step)
            correct.append(right)
    whole_table[used] = table.detach()
    return {"first": first, "steps": steps, "table": whole_table, "right": correct,
            "bytes": bytes_of_a_step(steps, args)}


def bytes_of_a_step(steps, args):
    """What travels in a step of a trainer, on average; float64 has 8 bytes. And the last gradients of the table."""
    n_trainers, dense = args.world_size - 2, args.num_classes * (args.embedding_dim + 1)
    sent = [len(indices) + len(offsets) + 2 * len(offsets) * args.embedding_dim
            for step in steps for indices, offsets in zip(step["indices"], step["offsets"], strict=True)]
    ring = 2 * (n_trainers - 1) / n_trainers * dense
    last = [len(indices) * (args.embedding_dim + 1) if args.sparse else args.num_embeddings * args.embedding_dim
            for indices in steps[-1]["indices"]]
    return {"bytes_per_step": 8 * (sum(sent) / len(sent) + ring), "table_gradient_bytes": 8 * sum(last) / len(last)}


# --- compared


def compare(recorded, metrics, args):
    """Hold what the trainers and the server have recorded against `single_process`: a `Comparison`."""
    found = Comparison(f"{args.world_size} processes")
    together = LOCKSTEP_EPOCHS * STEPS
    of_each = [trainer["steps"] for trainer in recorded]
    of_all = list(zip(*of_each, strict=False))
    alone = single_process(args, [[step["lookup"] for step in same] for same in of_all])
    steps = alone["steps"]

    def ours(key, part=slice(None)):
        return [[step.get(key, {}) for step in same] for same in of_all[part]]

    def theirs(key, part=slice(None), each=True):
        return [step[key] if each else [step[key]] * len(recorded) for step in steps[part]]

    (dense, table), our_table = alone["first"], recorded[0]["first"][1]
    found.equal("first weights, dense part", [[trainer["first"][0] for trainer in recorded]], [[dense] * len(recorded)],
                "the seed says them", "model")
    found.equal("first weights, table", [our_table.get("entries", [])], [table], "the seed says them", "model")
    found.equal("data, indices", ours("indices"), theirs("indices"), "batches of its own for each trainer and epoch")
    found.equal("data, offsets", ours("offsets"), theirs("offsets"), "where the bags begin")
    found.equal("data, targets", ours("target"), theirs("target"), "the teacher's classes")
    lockstep = slice(together)
    found.close("lockstep, looked-up sums", ours("lookup", lockstep), theirs("lookup", lockstep), TOLERANCE, BECAUSE)
    found.close("loss", ours("loss"), theirs("loss"), TOLERANCE, BECAUSE)
    found.close("dense part, gradients in the context", ours("dense gradient"), theirs("dense gradient", each=False),
                TOLERANCE, "float64; DDP averages over the trainers")
    found.close("dense part, weights after each step", ours("dense"), theirs("dense", each=False), TOLERANCE, BECAUSE)
    if len(recorded) > 1:
        found.equal("dense part, replicas", [same[1:] for same in ours("dense")],
                    [[same[0]] * (len(same) - 1) for same in ours("dense")], "DDP gives the same gradients to all")
    found.close("table, gradients in the context", ours("table gradient"), theirs("table gradient"), TOLERANCE, BECAUSE)
    found.close("lockstep, table after each step", [step.get("table", {}) for step in of_each[0][lockstep]],
                [step["table"] for step in steps[lockstep]], TOLERANCE,
                "float64; as far as the sum of the trainers' gradients, and no other row")
    hold_updates(found, recorded, alone, table, args)
    hold_metrics(found, recorded, metrics, alone, args)
    return found


def hold_updates(found, recorded, alone, table, args):
    """Each trainer's step of the table has arrived on the server, once; nothing else has changed the table."""
    server = recorded[0]["server"]
    sent = [step["table gradient"] for trainer in recorded for step in trainer["steps"]]
    arrived = list(server["updates"])
    twice = 0
    for gradient in sent:
        same = [i for i, other in enumerate(arrived) if gradient and all(
            torch.equal(gradient[key], other[key]) for key in ("rows", "entries"))]
        twice += len(same) > 1
        if same:
            del arrived[same[0]]
    n = len(server["updates"])
    found.holds("updates of the table, arrived once", n == len(sent) and not arrived,
                f"{len(sent)} gradients were sent, {n} steps were made, {len(arrived)} of them with something else"
                + ("" if n else "; what DistributedOptimizer compiles takes no lock, and updates can be lost"))
    found.holds("updates of the table, in turns", server["overlaps"] == 0,
                f"{server['overlaps']} of {n} steps began before another one had ended")
    last, change = table.clone(), None
    for step in [*(step for step in recorded[0]["steps"] if "table" in step), {"table": recorded[0]["change"]}]:
        change = step["table"]
        last[change["rows"]] = change["entries"]
    found.close("free, table at the end", [last], [alone["table"]], TOLERANCE,
                "float64; the first one and the sum of all updates", "run")


def hold_metrics(found, recorded, metrics, alone, args):
    """What the run reports."""
    n = len(recorded)
    losses = [sum(step["loss"]) / n for step in alone["steps"]]
    epochs = []
    for epoch in range(args.epochs):
        of_epoch = slice(epoch * STEPS, (epoch + 1) * STEPS)
        right = [[sum(step[rank][i] for step in alone["right"][of_epoch]) for i in (0, 1)] for rank in range(n)]
        epochs.append({"loss": sum(losses[of_epoch]) / STEPS, "accuracy": sum(r / bags for r, bags in right) / n})
    found.close("metrics, loss and accuracy", metrics["epochs"], epochs, TOLERANCE, BECAUSE, "epoch")
    for key, expected in alone["bytes"].items():
        found.close(f"metrics, {key}", [metrics[key]], [expected], TOLERANCE, "counted from indices and bags", "run")
    measured = []
    for trainer in recorded:
        spans = [step["span"] for step in trainer["steps"] if "span" in step]
        by_epoch = [spans[i : i + STEPS] for i in range(0, len(spans), STEPS)]
        measured.append(len(spans) / sum(epoch[-1][1] - epoch[0][0] for epoch in by_epoch))
    ratio = metrics["steps_per_s"] / (sum(measured) / n)
    found.holds("metrics, steps per second", 0.6 < ratio < 1.01,
                f"{ratio:.2f} of those between the first and the last step of each epoch, 0.6 to 1.01 expected: "
                "no start, no making of batches")


# --- the command


def check(args):
    """Hold a short training against a single process; `{what: difference}`, None where nothing is reported.

    Raises:
        SystemExit: 1 if something does not hold.
    """
    args = copy.copy(args)
    args.epochs = EPOCHS
    return verdict(launch(record, args, lesson.role_name))
