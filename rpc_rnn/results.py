"""What a run leaves: metrics, a text of the model, the checkpoint, the picture, the last line."""

import io
import math
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import checkpoint, picture, report
from common.cli import given, refuse
from common.report import NotFiniteError
from torch import nn, optim
from torch.distributed import rpc

from rpc_rnn.data import get_next_batch

SAMPLE_LENGTH = 200  # characters of generated text
LARGEST_LOSS = 700  # nats: e to the power of more is no float any more
WORDS = {
    "en": {"title": "A language model on {processes} processes: {corpus}",
           "synthetic": "A language model on {processes} processes: a synthetic Markov language",
           "x": "epoch", "y": "loss (nats per token)", "training": "training",
           "validation": "validation", "without_memory": "best without memory",
           "floor": "entropy of the source: the floor"},
    "ja": {"title": "{processes}プロセスの言語モデル：{corpus}",
           "synthetic": "{processes}プロセスの言語モデル：合成マルコフ言語",
           "x": "エポック", "y": "損失（ナット/トークン）", "training": "訓練",
           "validation": "検証", "without_memory": "記憶なしでの最良値",
           "floor": "情報源のエントロピー（下限）"},
}


# What a timeline shows (common/tracing.py): the parts compute, the trainer waits for some of it.
SPANS = {
    "rpc_rnn.main:EmbeddingTable.forward": ["forward", "backward"],
    "torch.nn:LSTM.forward": ["forward", "backward"],
    "rpc_rnn.main:Decoder.forward": ["forward", "backward"],
    "torch.distributed.autograd:backward": ["remote call"],
    "torch.distributed.optim:DistributedOptimizer.step": ["remote call"],
}


# --- the metrics


class History:
    """What is reported of a training: the losses of its epochs, its time, its round trips.

    Args:
        args: the parsed flags.
        table: the tokens of this trainer's columns.
        epochs: `{"loss", "val_loss"}` of each epoch so far, in nats per token.
        initial_val_loss: the loss of the validation tokens before the first step.
        show: whether this trainer has the bar.
    """

    def __init__(self, args, table, epochs, initial_val_loss, show):
        self.epochs, self.initial_val_loss = [*epochs], initial_val_loss
        self.steps, self.train_s, self.round_trips = 0, 0.0, None
        n_steps = math.ceil((len(table) - 1) / args.bptt)  # of an epoch
        self.bar = report.progress(args.epochs * n_steps, "step", len(epochs) * n_steps, show)

    def begin_epoch(self):
        """Begin to count its time."""
        self.losses, self.began = [], time.perf_counter()

    def count_round_trips(self, context_id, opt):
        """Count the RPCs of a step by what they leave in its context, before it ends."""
        context = dist_autograd._retrieve_context(context_id)  # torch has no public name for it
        sent, received = len(context._send_functions()), len(context._recv_functions())
        # Every tensor that came or went with a graph sends its gradient back.
        forward, backward = received, sent + received
        average = 2 if dist.is_initialized() and dist.get_rank() == 0 else 0
        step = sum(not optimizer.is_owner() for optimizer in opt.remote_optimizers)
        # At its end, the context is released on all other workers that know it.
        release = len(set(context._known_worker_ids()) - {rpc.get_worker_info().id})
        self.round_trips = forward + backward + average + step + release

    def add(self, loss, rows):
        """Add the mean loss of a step that has read so many rows of tokens.

        Raises:
            NotFiniteError: if it is not a number any more.
        """
        at = f"at step {len(self.losses) + 1} of epoch {len(self.epochs) + 1}"
        self.losses.append((report.require_finite(loss, at), rows))
        self.ended = time.perf_counter()
        self.bar.update()

    def end_epoch(self, val_loss):
        """Add the epoch, with the loss of the validation tokens after it."""
        self.epochs.append({"loss": mean_loss(self.losses), "val_loss": val_loss})
        self.steps += len(self.losses)
        self.train_s += self.ended - self.began  # without the validation


def mean_loss(losses):
    """The mean loss of a token, over all trainers.

    Args:
        losses: (mean loss, how many rows of tokens it stands for) of each piece of text.
    """
    rows = sum(n for _, n in losses)
    loss = sum(loss * n / rows for loss, n in losses)
    if not dist.is_initialized():  # one trainer
        return loss
    of_trainers = [None] * dist.get_world_size()
    dist.all_gather_object(of_trainers, loss)
    return sum(of_trainers) / len(of_trainers)  # each stands for equally many tokens


def evaluate(model, criterion, table, bptt):
    """The mean loss of a token without dropout, over the columns of all trainers.

    Args:
        model, criterion: as in the training.
        table: the tokens of this trainer's columns: shape (length, batch_size).
        bptt: how many rows are read at a time.
    """
    model.set_mode(training=False, seed=0)
    hidden, losses = model.init_hidden(table.size(1)), []
    with torch.no_grad():
        for data, target in get_next_batch(table, bptt):
            output, hidden = model(data, hidden)
            losses.append((criterion(output.flatten(0, 1), target.flatten()).item(), len(data)))
    # Also a barrier: nobody switches dropout on before all trainers are done.
    return mean_loss(losses)


def generate(model, language, seed):
    """A text: each character is drawn as likely as the model says, then read as the next input."""
    model.set_mode(training=False, seed=seed)
    hidden, token, sample = model.init_hidden(batch_size=1), language.val[:1].view(1, 1), []
    with torch.no_grad():
        for _ in range(SAMPLE_LENGTH):
            output, hidden = model(token, hidden)
            token = output.view(-1).softmax(dim=0).multinomial(1).view(1, 1)
            sample.append(language.vocabulary[int(token)])
    return "".join(sample)


def log_epoch(role, history):
    """Print the line of the last epoch."""
    text = "epoch {}  loss {loss:.3f}  validation loss {val_loss:.3f}"
    report.log(role, text.format(len(history.epochs), **history.epochs[-1]))


def summary(history, model, language, args):
    """The metrics of a training; with `--corpus`, beside them "sample", a text of the model.

    Args:
        history: what has happened.
        model: what has been trained.
        language: what was learned.
        args: the parsed flags.

    Raises:
        NotFiniteError: if there is no perplexity.
    """
    history.bar.close()
    val_loss = history.epochs[-1]["val_loss"]
    if not val_loss < LARGEST_LOSS:
        raise NotFiniteError(f"has a validation loss of {val_loss:.3g} after epoch "
                             f"{len(history.epochs)}: training has diverged; give a smaller --lr")
    return {"epochs": history.epochs, "initial_val_loss": history.initial_val_loss,
            "entropy_floor": language.entropy_floor,
            "floor_without_memory": language.floor_without_memory,
            "perplexity": math.exp(val_loss),
            "steps_per_s": history.steps / history.train_s if history.steps else None,
            "rpc_round_trips_per_step": history.round_trips,
            **({"sample": generate(model, language, args.seed)} if args.corpus else {})}


# --- the checkpoint of a model and optimizers that are spread over processes


class SGD(optim.SGD):
    """An SGD that `DistributedOptimizer` does not know.

    What it knows it compiles to TorchScript, which takes a tenth off the time of a step; but then
    nobody can fetch the optimizer's state. Of a class that it does not know it makes ordinary
    optimizers.
    """


class Adam(optim.Adam):
    """See `SGD`."""


PARTS = ("emb_table", "rnn", "decoder")  # the first word of a weight's name
OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam}
OPTIMIZERS_WITH_STATE = {"sgd": SGD, "adam": Adam}


def optimizer_class(args):
    """What `--optimizer` names; with `--checkpoint`, one whose state can be fetched."""
    return (OPTIMIZERS_WITH_STATE if args.checkpoint else OPTIMIZERS)[args.optimizer]


class LocalRNNModel(nn.Module):
    """The whole model in one process, without RPC: it loads the "model" of a checkpoint.

    Args:
        ntoken, ninp, nhid, nlayers: the sizes, as `RNNModel` has them.
    """

    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        self.emb_table = nn.ModuleDict({"encoder": nn.Embedding(ntoken, ninp)})
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.ModuleDict({"decoder": nn.Linear(nhid, ntoken)})

    def forward(self, input, hidden=None):
        """Tokens (T, B) and a state to scores (T, B, ntoken) and the next state; no dropout."""
        output, hidden = self.rnn(self.emb_table["encoder"](input), hidden)
        return self.decoder["decoder"](output), hidden


def weights(model):
    """All parameters of an `RNNModel`, from wherever they are, by their name in `LocalRNNModel`."""
    table, decoder = model.emb_table_rref, model.decoder_rref
    parts = {"emb_table": rpc.rpc_sync(table.owner(), _weights_of, args=(table,)),
             "rnn": _on_cpu(_lstm(model).state_dict()),
             "decoder": rpc.rpc_sync(decoder.owner(), _weights_of, args=(decoder,))}
    return {f"{part}.{name}": tensor for part in PARTS for name, tensor in parts[part].items()}


def require_checkpoint(args, language):
    """Before any process starts: refuse a checkpoint from which `args` cannot go on.

    Args:
        args: the parsed flags.
        language: what is learned; None where only the server starts.

    Raises:
        SystemExit: 2 after one line.
    """
    if language is None:
        return
    state = checkpoint.inspect(
        args, needs=("epochs", "vocabulary"),
        make_model=lambda: LocalRNNModel(language.ntoken, args.ninp, args.nhid, args.nlayers))
    if state is None:
        return
    if state["vocabulary"] != language.vocabulary:
        checkpoint.reject(args, "is of another text; give its --corpus, or another file")
    seed = state.get("seed", args.seed)  # earlier versions did not save it
    if language.vocabulary is None and seed != args.seed:
        checkpoint.reject(args, f"is of --seed {seed}, and {given(args, 'seed')} makes another "
                                "language; give that seed, or another file")
    optimizer = _optimizer_of(state)
    if optimizer not in (None, args.optimizer):
        checkpoint.reject(args, f"is of --optimizer {optimizer}, whose state "
                                f"{given(args, 'optimizer')} cannot use; give that optimizer, or "
                                "another file")
    if len(state["epochs"]) > args.epochs:
        refuse(f"{given(args, 'epochs')} must be at least {len(state['epochs'])}: the checkpoint "
               "has so many behind it", rank=1)


def save(model, opt, history, language, args):
    """With `--checkpoint`, write the model and the optimizers' states, from wherever they are."""
    if not args.checkpoint:
        return
    states = [rpc.rpc_sync(local.owner(), _optimizer_state, args=(local,))
              for local in opt.remote_optimizers]
    checkpoint.save(args, {
        "model": weights(model), "optimizers": states, "epochs": history.epochs, "seed": args.seed,
        "initial_val_loss": history.initial_val_loss, "vocabulary": language.vocabulary})


def restore(model, opt, rank, args):
    """Put a checkpoint back to where its parts belong; the epochs so far, the loss before them."""
    message = [checkpoint.load(args) if rank == 1 else None]
    if dist.is_initialized():
        # The other trainers may be on machines without the file.
        dist.broadcast_object_list(message)
    state = message[0]
    parts = {part: {name.removeprefix(f"{part}."): tensor
                    for name, tensor in state["model"].items() if name.startswith(f"{part}.")}
             for part in PARTS}
    _lstm(model).load_state_dict(parts["rnn"])
    for part, rref in (("emb_table", model.emb_table_rref), ("decoder", model.decoder_rref)):
        # All trainers send the same.
        rpc.rpc_sync(rref.owner(), _load_weights, args=(rref, parts[part]))
    # The server's optimizer comes first, the LSTM's last, and only the first trainer has both.
    last_first = zip(reversed(opt.remote_optimizers), reversed(state["optimizers"]), strict=False)
    for local, saved in last_first:
        rpc.rpc_sync(local.owner(), _load_optimizer_state, args=(local, saved, args.lr))
    if dist.is_initialized():
        # Or one trainer's backward could find that another has just loaded the tables.
        dist.barrier()
    return state["epochs"], state["initial_val_loss"]


def _lstm(model):
    """The LSTM of an `RNNModel`, without the DDP around it."""
    return getattr(model.rnn, "module", model.rnn)


def _on_cpu(state_dict):
    return {name: tensor.cpu() for name, tensor in state_dict.items()}


def _weights_of(part_rref):
    return _on_cpu(part_rref.local_value().state_dict())


def _load_weights(part_rref, weights):
    part_rref.local_value().load_state_dict(weights)


def _optimizer_of(state):
    """Whose state a checkpoint has: "sgd", "adam", or None if it has none."""
    if not state.get("optimizers"):
        return None
    return "adam" if "betas" in _unpacked(state["optimizers"][0])["param_groups"][0] else "sgd"


def _optimizer_state(optimizer_rref):
    """Where the optimizer is: its state, as bytes: RPC carries no tensors on a GPU."""
    buffer = io.BytesIO()
    torch.save(optimizer_rref.local_value().optim.state_dict(), buffer)
    return buffer.getvalue()


def _unpacked(saved):
    """The opposite, on the CPU."""
    return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)


def _load_optimizer_state(optimizer_rref, saved, lr):
    """Where the optimizer is: go on from that state, with the learning rate of this run."""
    optimizer = optimizer_rref.local_value().optim
    optimizer.load_state_dict(_unpacked(saved))
    optimizer.param_groups[0]["lr"] = lr


# --- what the user sees


def finish(metrics, args):
    """Write metrics.json, draw `loss.png`, print the last line; the whole metrics."""
    metrics = report.save_metrics(args, metrics, backend="tensorpipe")
    plot([metrics], args)
    if "sample" in metrics:
        print(f"\n{metrics['sample']}\n")
    before, after = metrics["initial_val_loss"], metrics["epochs"][-1]["val_loss"]
    floor = "" if args.corpus else f" (the source's entropy is {metrics['entropy_floor']:.2f})"
    speed = (f"{metrics['steps_per_s']:.0f} steps/s" if metrics["steps_per_s"]
             else "nothing left to train")
    print(f"loss {before:.2f} -> {after:.2f}{floor} | "
          f"validation perplexity {metrics['perplexity']:.2f} | "
          f"{speed}, {metrics['rpc_round_trips_per_step']} RPC round trips a step")
    return metrics


def plot(runs, args):
    """Draw `loss.png`, from the metrics of one or several runs."""
    words = {language: {**texts, "title": texts["title" if args.corpus else "synthetic"]}
             for language, texts in WORDS.items()}
    floors = runs[0]
    for axes, texts in picture.in_each_language(args.output_dir / "loss.png", words, runs,
                                                processes=args.world_size, corpus=args.corpus):
        epochs = range(1, len(floors["epochs"]) + 1)
        losses, val_losses = ([[epoch[key] for epoch in run["epochs"]] for run in runs]
                              for key in ("loss", "val_loss"))
        val_losses = [[run["initial_val_loss"], *of_run]
                      for run, of_run in zip(runs, val_losses, strict=True)]
        picture.line(axes, epochs, losses, ".-", color=picture.GREY, label=texts["training"])
        picture.line(axes, [0, *epochs], val_losses, "o-", color="C0", label=texts["validation"])
        if floors["entropy_floor"] is not None:
            axes.axhline(floors["floor_without_memory"], color="C4", linestyle=":",
                         label=texts["without_memory"])
            axes.axhline(floors["entropy_floor"], color="C1", linestyle="--",
                         label=texts["floor"])
        axes.xaxis.get_major_locator().set_params(integer=True)
