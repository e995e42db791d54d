r"""A language model split over RPC: distributed autograd and optimizer (tutorial 6_5, second half).

The embedding table and the decoder live on a parameter server, the LSTM on the trainer. Forward,
backward and optimizer step each cross the wire, and read like those of a local model.

    rank 0 "ps"                                    rank 1 "trainer"
    +-------------------+  <-- tokens -----------  +----------------------------------------+
    | EmbeddingTable    |  --- embeddings ------>  | with dist_autograd.context() as id:    |
    |                   |  <-- states ---------    |   output, hidden = model(data, hidden) |
    | Decoder           |  --- scores --------->   |   loss = criterion(output, target)     |
    |                   |  <-- their gradient --   |   dist_autograd.backward(id, [loss])   |
    |                   |  --- of the states -->   |                                        |
    |                   |  <-- of embeddings ---   |                                        |
    | gradients of id   |  <-- step(id) --------   |   opt.step(id)                         |
    +-------------------+                          +----------------------------------------+

    python rpc_rnn/main.py                            a synthetic language of known entropy
    python rpc_rnn/main.py --corpus README.ja.md      any text, in any script
    python rpc_rnn/main.py --world_size 3             two trainers, one set of tables
    python rpc_rnn/main.py --prefetch                 fewer round trips: prefetch.py
    python rpc_rnn/main.py --check                    the same numbers as one process?
    torchrun --nproc_per_node 2 rpc_rnn/main.py       under torchrun

Last line: loss 2.30 -> 1.20 (the source's entropy is 1.18) | validation perplexity 3.33 | ...
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import report
from common.cli import Parser, bounded
from common.launcher import launch
from common.session import device_for, group_options, rpc_options
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from rpc_rnn import prefetch, results, saving
from rpc_rnn.data import columns, get_next_batch, load_language
from rpc_rnn.evaluation import evaluate, set_mode, with_sample
from rpc_rnn.several_trainers import average_table_gradients, the_only

OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam}
RPC_THREADS = 4  # that execute incoming calls; 16, the default, make 4% fewer steps per second


def role_name(rank, world_size):
    """Rank 0 is the parameter server, all others are trainers."""
    return "ps" if rank == 0 else "trainer" if world_size == 2 else f"trainer{rank}"


class Part(nn.Module):
    """A part of the model that lives on the server, where the trainer calls its methods."""

    def parameter_rrefs(self):
        """See `_parameter_rrefs`."""
        return _parameter_rrefs(self)


class EmbeddingTable(Part):
    """Encoding layer of the RNNModel: tokens (T, B) to embeddings (T, B, ninp)."""

    def __init__(self, ntoken, ninp, dropout, seed, device):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        # A generator of its own: the server makes both parts at the same time, in two threads.
        self.encoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.device = device_for(device)
        self.to(self.device)  # Tutorial: .cuda()

    def forward(self, input):
        """RPC carries CPU tensors: move them at the border."""
        return self.drop(self.encoder(input.to(self.device))).cpu()  # Tutorial: a ) was missing


class Decoder(Part):
    """Decoding layer of the RNNModel: states (T, B, nhid) to scores (T, B, ntoken)."""

    def __init__(self, ntoken, nhid, dropout, seed, device):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.bias.data.zero_()
        self.decoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.device = device_for(device)
        self.to(self.device)

    def forward(self, output):
        """Like `EmbeddingTable.forward`."""
        return self.decoder(self.drop(output.to(self.device))).cpu()


class RNNModel(nn.Module):
    """A language model on two processes: RPC stands where two GPUs have `Tensor.to(device)`."""

    def __init__(self, ps, ntoken, ninp, nhid, nlayers, dropout=0.5, seed=0, device="auto"):
        super().__init__()
        self.nlayers, self.nhid, self.device = nlayers, nhid, device_for(device)
        # Set up the embedding table remotely. The seeds differ, or all parts would draw alike.
        # Tutorial: rpc.remote(ps, EmbeddingTable, ...); several trainers need the same one.
        self.emb_table_rref = rpc.remote(
            ps, the_only, args=(EmbeddingTable, ntoken, ninp, dropout, 3 * seed, device))
        # Set up the LSTM locally, with the same weights on every trainer.
        torch.manual_seed(3 * seed + 1)
        between_layers = dropout if nlayers > 1 else 0
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=between_layers).to(self.device)
        if dist.is_initialized():  # several trainers: DDP averages their gradients
            gpus = [self.device] if self.device.type == "cuda" else None
            self.rnn = DDP(self.rnn, device_ids=gpus)
        # Set up the decoder remotely.
        self.decoder_rref = rpc.remote(
            ps, the_only, args=(Decoder, ntoken, nhid, dropout, 3 * seed + 2, device))

    def forward(self, input, hidden):
        """Tokens (T, B) and a state to scores (T, B, ntoken) and the next state."""
        output, hidden = self.rnn(self.look_up(input).to(self.device), hidden)
        # Pass the output to the remote decoder and get the scores back.
        return self.decoder_rref.rpc_sync().forward(output.cpu()), hidden

    def look_up(self, input):
        """Pass the input to the remote embedding table and get the embeddings back."""
        # Tutorial: _remote_method(EmbeddingTable.forward, ...), which RRefs have as rpc_sync().
        return self.emb_table_rref.rpc_sync().forward(input)

    def parameter_rrefs(self):
        """RRefs of all parameters: of the embedding table, the LSTM here, the decoder."""
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def init_hidden(self, batch_size):
        """The state before the first token: twice (nlayers, B, nhid)."""
        return torch.zeros(2, self.nlayers, batch_size, self.nhid, device=self.device).unbind()


def _parameter_rrefs(module):
    """An RRef for each parameter, made where the parameters are."""
    return [rpc.RRef(param) for param in module.parameters()]


def run_trainer(rank, world_size, args):
    """Train; the first trainer returns the metrics, the others None."""
    language, n_trainers = load_language(args), world_size - 1
    train_table, val_table = (columns(tokens, args.batch_size, rank - 1, n_trainers)
                              for tokens in (language.train, language.val))
    model = RNNModel("ps", language.ntoken, args.ninp, args.nhid, args.nlayers, args.dropout,
                     args.seed, args.device)
    # One optimizer for parameters anywhere; of several trainers, the first one's has the tables.
    param_rrefs = model.parameter_rrefs() if rank == 1 else _parameter_rrefs(model.rnn)
    optimizers = saving.OPTIMIZERS_WITH_STATE if args.checkpoint or args.prefetch else OPTIMIZERS
    opt = DistributedOptimizer(optimizers[args.optimizer], param_rrefs, lr=args.lr)
    opt, pieces = prefetch.rung(model, opt) if args.prefetch else (opt, get_next_batch)
    criterion = nn.CrossEntropyLoss()
    epochs, initial = saving.restore(model, opt, rank, args) if args.resume else ([], None)
    initial = evaluate(model, criterion, val_table, args.bptt) if initial is None else initial
    resumed, train_s, round_trips = len(epochs), 0.0, None
    n_steps = len(list(get_next_batch(train_table, args.bptt)))  # of an epoch
    bar = report.progress(args.epochs * n_steps, "step", resumed * n_steps, show=rank == 1)
    for epoch in range(resumed, args.epochs):
        # A seed for the dropout of each epoch: a resumed training goes on as if never stopped.
        set_mode(model, training=True, seed=1_000_000 * args.seed + 1000 * epoch, rank=rank)
        hidden, losses, started = model.init_hidden(args.batch_size), [], time.perf_counter()
        for data, target in pieces(train_table, args.bptt):
            # The context holds the gradients of this step, on the trainer and on the server.
            with dist_autograd.context() as context_id:
                # Tutorial: detach_(), which views refuse. The values go on, their history ends.
                hidden = (hidden[0].detach(), hidden[1].detach())
                output, hidden = model(data, hidden)
                # Tutorial: criterion(output, target), whose axis of classes was the batch.
                loss = criterion(output.flatten(0, 1), target.flatten())
                # Through the decoder over there, the LSTM here, the embedding table over there.
                dist_autograd.backward(context_id, [loss])
                if n_trainers > 1:
                    average_table_gradients(model, context_id)
                # Every owner of parameters steps. No zero_grad(): the next step has a new context.
                opt.step(context_id)
                if n_trainers > 1:
                    dist.barrier()  # nobody looks up the tables before they have changed
                round_trips = results.count_round_trips(context_id, opt)
            at = f"at step {len(losses) + 1} of epoch {epoch + 1}"
            losses.append((report.require_finite(loss, at), len(data)))
            bar.update()
        train_s += time.perf_counter() - started
        val_loss = evaluate(model, criterion, val_table, args.bptt)
        epochs.append({"loss": results.mean_loss(losses), "val_loss": val_loss})
        if rank == 1:
            results.log_epoch(role_name(rank, world_size), epochs)
            saving.save(model, opt, epochs, initial, language, args)
    bar.close()
    steps = (args.epochs - resumed) * n_steps
    metrics = results.summary(epochs, initial, language, steps, train_s, round_trips)
    return with_sample(metrics, model, language, args) if rank == 1 else None


def run_worker(rank, world_size, args):
    """Rank 0 serves; the others train, and the first of them returns the metrics."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    if rank != 0 and world_size > 2:  # several trainers: a group for DDP, in which rank 1 is first
        dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank - 1,
                                world_size=world_size - 1)
    # The server has nothing to do here: it answers the trainers' calls until all have finished.
    metrics = run_trainer(rank, world_size, args) if rank != 0 else None
    if dist.is_initialized():
        dist.destroy_process_group()  # no DDP may be left: pytorch/pytorch issue 56297
    rpc.shutdown()
    return metrics


def build_parser():
    """The flags of this example."""
    parser = Parser("rpc_rnn", __doc__, world_size=2, min_world_size=2)
    parser.set_defaults(checkpoint_rank=1)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--corpus", type=Path, metavar="FILE", help="a UTF-8 text (default: a synthetic language)")
    add("--epochs", type=count, default=8, metavar="N", help="times that every token is trained on")
    add("--batch_size", type=count, default=20, metavar="N", help="columns that a trainer reads")
    add("--bptt", type=count, default=35, metavar="N", help="tokens of a column in a step")
    add("--ninp", type=count, default=32, metavar="N", help="size of the embeddings")
    add("--nhid", type=count, default=64, metavar="N", help="size of the LSTM's state")
    add("--nlayers", type=count, default=1, metavar="N", help="layers of the LSTM")
    add("--dropout", type=bounded(float, at_least=0, at_most=1), default=0.0, metavar="P",
        help="of embeddings and states; small texts need some")
    add("--lr", type=bounded(float, above=0), default=0.005, help="learning rate")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="on every owner of parameters")
    add("--prefetch", action="store_true", help="the server steps and looks up in one RPC")
    parser.add_checkpoint_flags()
    return parser


def main(argv=None):
    """Train, or `--check`; the metrics or the differences in the process that reports, or None."""
    args = build_parser().parse_args(argv)
    saving.require_inputs(args)
    if args.check:
        from rpc_rnn.check import check
        return check(args)
    metrics = launch(run_worker, args, role_name)
    return None if metrics is None else results.finish(metrics, args)


if __name__ == "__main__":
    main()
