r"""A language model split over RPC: distributed autograd and the distributed optimizer (tutorial 6_5, second half).

The embedding table and the decoder live on a parameter server, the LSTM on the trainer. Forward, backward and optimizer
step each cross the wire, and read like those of a local model.

    rank 0 "ps"                                        rank 1 "trainer"
    +-------------------+  <-- tokens ---------------  +----------------------------------------+
    | EmbeddingTable    |  --- embeddings ---------->  | with dist_autograd.context() as id:    |
    |                   |  <-- states -------------    |   output, hidden = model(data, hidden) |
    | Decoder           |  --- scores ------------->   |   loss = criterion(output, target)     |
    |                   |  <-- gradient of scores --   |   dist_autograd.backward(id, [loss])   |
    |                   |  --- gradient of states ->   |                                        |
    |                   |  <-- grad. of embeddings -   |                                        |
    | gradients of id   |  <-- step(id) ------------   |   opt.step(id)                         |
    +-------------------+                              +----------------------------------------+

    python rpc_rnn/main.py                                       a made language, whose entropy is known
    python rpc_rnn/main.py --corpus README.ja.md                 any text, in any script
    python rpc_rnn/main.py --world_size 3                        two trainers, one set of tables
    python rpc_rnn/main.py --check                               the same numbers as a single process?
    torchrun --nproc_per_node 2 rpc_rnn/main.py                  under torchrun

Last line, about:
    loss 2.30 -> 1.20 (the source's entropy is 1.18) | validation perplexity 3.33 | 129 steps/s, 7 RPC round trips ...
"""

import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import checkpoint, cli, report
from common.cli import Parser, bounded, given, refuse, starts_rank
from common.launch import launch
from common.session import device_for, group_options, rpc_options
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn.language import VAL_SHARE, columns, get_next_batch, load_language
from rpc_rnn.model import RNNModel, _parameter_rrefs
from rpc_rnn.saving import OPTIMIZERS_WITH_STATE, restore, save
from rpc_rnn.single_process import LocalRNNModel, by_part, step_alone

OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam}
RPC_THREADS = 4  # that execute incoming calls; 16, the default, make 4% fewer steps per second
SAMPLE_LENGTH = 200  # characters of generated text


def role_name(rank, world_size):
    """Rank 0 is the parameter server, all others are trainers."""
    return "ps" if rank == 0 else "trainer" if world_size == 2 else f"trainer{rank}"


def average_table_gradients(model, context_id):
    """Let the server average what every trainer's backward has left there, as DDP has done with the LSTM's gradients.

    Each trainer has a context of its own, and in it the gradients of its own batch. Afterwards the context of the first
    trainer holds those of the joined batch.
    """
    context_ids = [torch.zeros(1, dtype=torch.int64, device=model.device) for _ in range(dist.get_world_size())]
    own_id = torch.tensor([context_id], device=model.device)
    dist.all_gather(context_ids, own_id)  # also: everyone's backward has ended
    if dist.get_rank() == 0:
        model.average_gradients([int(other) for other in context_ids])


def train_step(model, opt, criterion, data, target, hidden):
    """Forward, backward and optimizer step across processes; the loss, the state to go on with, how many RPCs."""
    # The context is where the gradients of this step will be, on the trainer and on the server.
    with dist_autograd.context() as context_id:
        hidden = tuple(state.detach() for state in hidden)  # its values go on, its history ends here
        output, hidden = model(data, hidden)
        loss = criterion(output.flatten(0, 1), target.flatten())
        # From the loss through the decoder over there, the LSTM here, the embedding table over there.
        dist_autograd.backward(context_id, [loss])
        if dist.is_initialized():  # several trainers
            average_table_gradients(model, context_id)
        # Every owner of parameters makes its step, with the gradients of this context. No zero_grad(): the next step
        # has a context of its own.
        opt.step(context_id)
        if dist.is_initialized():
            dist.barrier()  # nobody may look up the tables before the first trainer's step has changed them
        return loss.item(), hidden, count_round_trips(context_id, opt)


def count_round_trips(context_id, opt):
    """How many RPCs the step in this context has made, counted by what they have left in it."""
    context = dist_autograd._retrieve_context(context_id)  # torch has no public name for it
    sent, received = len(context._send_functions()), len(context._recv_functions())
    forward, backward = received, sent + received  # every tensor that came or went with a graph sends its gradient back
    average = 2 if dist.is_initialized() and dist.get_rank() == 0 else 0
    step = sum(not optimizer.is_owner() for optimizer in opt.remote_optimizers)
    release = len(set(context._known_worker_ids()) - {rpc.get_worker_info().id})  # of the context, at its end
    return forward + backward + average + step + release


def make_optimizer(model, rank, args):
    """One optimizer for parameters anywhere. The first trainer's steps the tables too, that of others their LSTM."""
    optimizer_class = OPTIMIZERS_WITH_STATE[args.optimizer] if args.checkpoint else OPTIMIZERS[args.optimizer]
    param_rrefs = model.parameter_rrefs() if rank == 1 else _parameter_rrefs(model.lstm)
    return DistributedOptimizer(optimizer_class, param_rrefs, lr=args.lr)


def _run_trainer(rank, world_size, args):
    """Train; the first trainer returns the metrics, the others None."""
    n_trainers = world_size - 1
    language = load_language(args)
    train_table, val_table = (columns(part, args.batch_size, rank - 1, n_trainers)
                              for part in (language.train, language.val))
    model = RNNModel("ps", language.ntoken, args.ninp, args.nhid, args.nlayers, args.dropout, args.seed, args.device)
    opt = make_optimizer(model, rank, args)
    criterion = nn.CrossEntropyLoss()
    epochs, initial_val_loss = restore(model, opt, rank, args) if args.resume else ([], None)
    if initial_val_loss is None:
        initial_val_loss = evaluate(model, criterion, val_table, args)

    resumed, train_s, round_trips = len(epochs), 0.0, None
    n_steps = math.ceil((len(train_table) - 1) / args.bptt)
    with report.progress(args.epochs * n_steps, "step", resumed * n_steps, show=rank == 1) as bar:
        for epoch in range(resumed, args.epochs):
            # Another seed for the dropout of each epoch, so that a resumed training goes on as if it had never stopped.
            model.set_mode(training=True, seed=1_000_000 * args.seed + 1000 * epoch + rank)
            hidden, total, started = model.init_hidden(args.batch_size), 0.0, time.perf_counter()
            for data, target in get_next_batch(train_table, args.bptt):
                loss, hidden, round_trips = train_step(model, opt, criterion, data, target, hidden)
                total += loss * len(data) / (len(train_table) - 1)
                bar.update()
            train_s += time.perf_counter() - started
            val_loss = evaluate(model, criterion, val_table, args)
            epochs.append({"loss": mean_over_trainers(total), "val_loss": val_loss})
            if rank == 1:
                text = "epoch {}  loss {loss:.3f}  validation loss {val_loss:.3f}".format(epoch + 1, **epochs[-1])
                report.log(role_name(rank, world_size), text)
                if args.checkpoint:
                    save(model, opt, epochs, initial_val_loss, language, args)
    metrics = {"epochs": epochs, "initial_val_loss": initial_val_loss, "entropy_floor": language.entropy_floor,
               "floor_without_memory": language.floor_without_memory, "perplexity": math.exp(epochs[-1]["val_loss"]),
               "steps_per_s": (args.epochs - resumed) * n_steps / train_s if train_s else None,
               "rpc_round_trips_per_step": round_trips}
    if rank != 1:
        return None
    return metrics if args.corpus is None else {**metrics, "sample": generate(model, language, args)}


def evaluate(model, criterion, table, args):
    """The mean loss without dropout, also on the server, over the columns of all trainers."""
    model.set_mode(training=False, seed=0)
    hidden, total = model.init_hidden(args.batch_size), 0.0
    with torch.no_grad():
        for data, target in get_next_batch(table, args.bptt):
            output, hidden = model(data, hidden)
            total += criterion(output.flatten(0, 1), target.flatten()).item() * len(data) / (len(table) - 1)
    return mean_over_trainers(total)  # also: no trainer switches dropout on before all are done


def mean_over_trainers(number):
    """Of numbers that stand for equally many tokens."""
    if not dist.is_initialized():
        return number
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return sum(numbers) / len(numbers)


def generate(model, language, args):
    """A text from the model: each character is drawn as likely as the model says, then read as the next input."""
    model.set_mode(training=False, seed=args.seed)
    hidden, token, sample = model.init_hidden(batch_size=1), language.val[:1].view(1, 1), []
    with torch.no_grad():
        for _ in range(SAMPLE_LENGTH):
            output, hidden = model(token, hidden)
            token = output.view(-1).softmax(dim=0).multinomial(1).view(1, 1)
            sample.append(language.vocabulary[int(token)])
    return "".join(sample)


def run_worker(rank, world_size, args):
    """Rank 0 serves; the others train, and the first of them returns the metrics."""
    join(rank, world_size, args)
    metrics = _run_trainer(rank, world_size, args) if rank != 0 else None
    leave()
    return metrics


def join(rank, world_size, args):
    """Everybody joins the RPC world; several trainers also a process group of their own, in which rank 1 is first."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    if rank != 0 and world_size > 2:
        dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank - 1,
                                world_size=world_size - 1)


def leave():
    """Wait for everyone: until then, the server answers the trainers' calls.

    No DDP may be left: it would end the threads of its group while Python's lock is held, for which one of them may
    wait (pytorch/pytorch issue 56297).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    rpc.shutdown()


class Recorder:
    """For `check`: an optimizer that looks at the gradients before it makes its step."""

    def __init__(self, opt, model):
        self.opt, self.model, self.remote_optimizers = opt, model, opt.remote_optimizers

    def step(self, context_id):
        """Fetch the gradients of all parameters from the context, then make the step."""
        self.gradients = self.model.gradients(context_id)
        self.opt.step(context_id)


def record_step(rank, world_size, args):
    """For `check`: one step without dropout; the first trainer returns its loss, gradients and new weights."""
    join(rank, world_size, args)
    recorded = None
    if rank != 0:
        n_trainers, language = world_size - 1, load_language(args)
        table = columns(language.train, args.batch_size, rank - 1, n_trainers)
        model = RNNModel("ps", language.ntoken, args.ninp, args.nhid, args.nlayers, 0, args.seed, args.device)
        opt = Recorder(make_optimizer(model, rank, args), model)
        data, target = next(get_next_batch(table, args.bptt))
        hidden = model.init_hidden(args.batch_size)
        loss, _, _ = train_step(model, opt, nn.CrossEntropyLoss(), data, target, hidden)
        loss = mean_over_trainers(loss)
        recorded = by_part(loss, opt.gradients, model.weights()) if rank == 1 else None
        del model, opt  # a DDP in it must not outlive its group, see `leave`
    leave()
    return recorded


def check(args):
    """Hold one step over RPC against a single process; the differences, or None where nothing is reported."""
    recorded = launch(record_step, args, role_name)
    if recorded is None:
        return None
    alone = step_alone(OPTIMIZERS[args.optimizer], args)
    # The same float32 sums, for several trainers in another order.
    return report.compare(recorded, alone, dict.fromkeys(alone, 1e-5))


def plot(metrics, args):
    """Draw `loss.png`."""
    title = f"A language model on {args.world_size} processes: {args.corpus or 'a made language'}"
    with report.picture(args.output_dir / "loss.png", title, "epoch", "loss (nats per token)") as axes:
        epochs = range(1, len(metrics["epochs"]) + 1)
        axes.plot(epochs, [epoch["loss"] for epoch in metrics["epochs"]], ".-", color="0.6", label="training")
        val_losses = [metrics["initial_val_loss"], *(epoch["val_loss"] for epoch in metrics["epochs"])]
        axes.plot([0, *epochs], val_losses, "o-", color="C0", label="validation")
        if metrics["entropy_floor"] is not None:
            axes.axhline(metrics["floor_without_memory"], color="C1", linestyle=":", label="best without memory")
            axes.axhline(metrics["entropy_floor"], color="C3", linestyle="--", label="entropy of the source: the floor")


def build_parser():
    """The flags of this example."""
    parser = Parser("rpc_rnn", __doc__, world_size=2, min_world_size=2)
    parser.set_defaults(checkpoint_rank=1)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--corpus", type=Path, metavar="FILE",
        help="a UTF-8 text to learn, character by character (default: a synthetic language)")
    add("--epochs", type=count, default=8, metavar="N", help="times that every token is trained on")
    add("--batch_size", type=count, default=20, metavar="N", help="columns of text that a trainer reads side by side")
    add("--bptt", type=count, default=35, metavar="N", help="tokens of a column in a step: how far gradients go back")
    add("--ninp", type=count, default=32, metavar="N", help="size of the embeddings")
    add("--nhid", type=count, default=64, metavar="N", help="size of the LSTM's state")
    add("--nlayers", type=count, default=1, metavar="N", help="layers of the LSTM")
    add("--dropout", type=bounded(float, at_least=0, at_most=1), default=0.0, metavar="P",
        help="of embeddings and states; small texts need some")
    add("--lr", type=bounded(float, above=0), default=0.005, help="learning rate")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="that DistributedOptimizer makes on every owner")
    parser.add_checkpoint_flags()
    return parser


def require_language(args):
    """The language, if it can be read and fills the columns of all trainers; else refuse it."""
    n_trainers, speaker = args.world_size - 1, first_trainer_here(args)
    n_columns = args.batch_size * n_trainers
    # An input and a target in each column, also of the validation part.
    fewest = math.ceil(2 * n_columns / VAL_SHARE)
    wanted = f"--corpus {args.corpus} must be a UTF-8 text of at least {fewest} characters"
    if args.corpus is not None:
        if not cli.require_file("--corpus", args.corpus, speaker):
            refuse(f"{wanted} (no such file)", speaker)
        # A character has 4 bytes at most, and in each trainer it becomes a token of 8.
        of_trainer = 8 * args.corpus.stat().st_size // 4
        cli.require_memory(args, ["corpus"], n_trainers_here(args) * of_trainer, speaker)
    try:
        language = load_language(args)
    except (OSError, ValueError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) else "this is no text"
        refuse(f"{wanted} ({reason})", speaker)
    if len(language.val) < 2 * n_columns:
        if args.corpus is None:
            trainers = "1 trainer" if n_trainers == 1 else f"{n_trainers} trainers"
            refuse(f"{given(args, 'batch_size')} must be at most "
                   f"{len(language.val) // 2 // n_trainers} for {trainers}", speaker)
        refuse(f"{wanted}, or {given(args, 'batch_size')} smaller: it has "
               f"{len(language.train) + len(language.val)}", speaker)
    return language


def require_model(language, args):
    """Refuse sizes with which the model does not fit into this machine."""
    weights = 2 if cli.on_cpu(args) else 1  # on a CPU, with their gradients
    tables = language.ntoken * (args.ninp + args.nhid)
    deeper = (args.nlayers - 1) * (2 * args.nhid + 2)
    lstm = 4 * args.nhid * (args.ninp + args.nhid + 2 + deeper)
    # Four gates and a state of each token, which the backward pass needs.
    rows = min(args.bptt, len(language.train) // (args.batch_size * (args.world_size - 1)) - 1)
    states = 5 * rows * args.batch_size * args.nhid * args.nlayers if cli.on_cpu(args) else 0
    # Besides, PyTorch needs hundreds of bytes for each of the four parameters of a layer.
    of_trainer = 4 * (weights * lstm + states) + 1000 * args.nlayers
    of_server = 4 * weights * tables if 0 in cli.ranks_here(args) else 0
    cli.require_memory(args, ["ninp", "nhid", "nlayers"],
                       of_server + n_trainers_here(args) * of_trainer, first_trainer_here(args))


def n_trainers_here(args):
    """How many trainers this command starts; under torchrun, how many this machine has."""
    return sum(rank > 0 for rank in cli.ranks_here(args))


def first_trainer_here(args):
    """The rank of the first one: under torchrun, it says what is refused."""
    return max(1, cli.ranks_here(args)[0])


def parse_args(argv, parser):
    """The flags, when corpus and checkpoint are there and fit to them."""
    args = parser.parse_args(argv)
    if starts_rank(args, 0) and not starts_rank(args, 1):
        return args  # the server needs neither
    language = require_language(args)
    require_model(language, args)
    state = checkpoint.inspect(
        args, needs=("epochs", "vocabulary"),
        make_model=lambda: LocalRNNModel(language.ntoken, args.ninp, args.nhid, args.nlayers))
    if state and state["vocabulary"] != language.vocabulary:
        checkpoint.reject(args, "is of another text; give its --corpus, or another file")
    if state and len(state["epochs"]) > args.epochs:
        refuse(f"{given(args, 'epochs')} must be at least {len(state['epochs'])}: the checkpoint "
               "has so many behind it", rank=1)
    return args


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports, None elsewhere."""
    args = parse_args(argv, build_parser())
    if args.check:
        return check(args)
    metrics = launch(run_worker, args, role_name)
    if metrics is None:
        return None
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot(metrics, args)
    if "sample" in metrics:
        print(f"\n{metrics['sample']}\n")
    floor = "" if args.corpus else f" (the source's entropy is {metrics['entropy_floor']:.2f})"
    speed = f"{metrics['steps_per_s']:.0f} steps/s" if metrics["steps_per_s"] else "nothing left to train"
    print(f"loss {metrics['initial_val_loss']:.2f} -> {metrics['epochs'][-1]['val_loss']:.2f}{floor} | "
          f"validation perplexity {metrics['perplexity']:.2f} | {speed}, "
          f"{metrics['rpc_round_trips_per_step']} RPC round trips a step")
    return metrics


if __name__ == "__main__":
    main()
