r"""A language model split over RPC: distributed autograd and optimizer (tutorial 6_5, second half).

The embedding table and the decoder live on a parameter server, the LSTM on the trainer. The forward
pass, the backward pass and the optimizer step all cross between the processes. Their code still
reads like that of a local model.

    rank 0 "ps"                                    rank 1 "trainer"
    +-------------------+  <-- tokens -----------  +----------------------------------------+
    | EmbeddingTable    |  --- embeddings ------>  | with dist_autograd.context() as id:    |
    |                   |  <-- output -----------  |   output, hidden = model(data, hidden) |
    | Decoder           |  --- scores ---------->  |   loss = criterion(output, target)     |
    |                   |  <-- grad. of scores --  |   dist_autograd.backward(id, [loss])   |
    |                   |  --- grad. of output ->  |                                        |
    |                   |  <-- of embeddings ----  |                                        |
    | gradients of id   |  <-- step(id) ---------  |   opt.step(id)                         |
    +-------------------+                          +----------------------------------------+

    python rpc_rnn/main.py                            a synthetic language of known entropy
    python rpc_rnn/main.py --corpus README.ja.md      any text, in any script
    python rpc_rnn/main.py --check                    compare with a single process
    torchrun --nproc_per_node 2 rpc_rnn/main.py       under torchrun

It ends with: loss 2.30 -> 1.20 (the source's entropy is 1.18) | validation perplexity 3.33 | ...
"""

from argparse import Namespace
from pathlib import Path

from common.cli import Parser, bounded, refuse
from common.program import run_program
from common.session import device_for, rpc_options

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn import results, saving
from rpc_rnn.data import columns, get_next_batch, load_language, require_inputs

PS_NAME = "ps"
RPC_THREADS = 4  # threads for incoming calls; with the default of 16, a step takes longer


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: rank 0 is the parameter server, rank 1 the trainer."""
    return PS_NAME if rank == 0 else "trainer"


class Part(nn.Module):
    """A part of the model on the server, with methods that the trainer calls over RPC."""

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return an RRef to each parameter of this part."""
        return _parameter_rrefs(self)

    def set_mode(self, training: bool, seed: int) -> None:
        """Do as `RNNModel.set_mode`; `train()` would return the module, which RPC would send."""
        torch.manual_seed(seed)
        self.train(training)


class EmbeddingTable(Part):
    """The encoder of the RNNModel: tokens (T, B) to embeddings (T, B, ninp)."""

    def __init__(self, ntoken: int, ninp: int, dropout: float, seed: int, device: str) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        # Own generator: the server creates both parts at the same time, in two threads.
        self.encoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.device = device_for(device)
        self.to(self.device)  # Tutorial: .cuda()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up tokens; input and result are on the CPU, because RPC sends CPU tensors."""
        return self.drop(self.encoder(input.to(self.device))).cpu()  # Tutorial: a ) was missing


class Decoder(Part):
    """The decoder of the RNNModel: the LSTM's output (T, B, nhid) to scores (T, B, ntoken)."""

    def __init__(self, ntoken: int, nhid: int, dropout: float, seed: int, device: str) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.bias.data.zero_()
        self.decoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.device = device_for(device)
        self.to(self.device)

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        """Compute the scores; input and result are on the CPU, as in `EmbeddingTable.forward`."""
        return self.decoder(self.drop(output.to(self.device))).cpu()


class Adam(optim.Adam):
    """A subclass of `optim.Adam`, which `DistributedOptimizer` does not recognize.

    For torch's own classes, `DistributedOptimizer` creates a functional optimizer, compiled by
    TorchScript. A functional optimizer has two disadvantages. No process can fetch its state, so a
    checkpoint would lose the state. Its step takes no lock, so one of two simultaneous steps of two
    trainers can be lost. For a class that it does not recognize, `DistributedOptimizer` creates an
    ordinary optimizer, which has a `state_dict` and steps under a lock.

    The cost: an ordinary optimizer runs in Python. It holds the interpreter lock, so the server's
    threads wait for each other. Here a single trainer calls `step`, and the checkpoint matters.
    """


class RNNModel(nn.Module):
    """A model on two processes, joined by RPC as two GPUs would be by `Tensor.to(device)`."""

    def __init__(self, ps: str, ntoken: int, ninp: int, nhid: int, nlayers: int,
                 dropout: float = 0.5, seed: int = 0, device: str = "auto") -> None:
        super().__init__()
        self.nlayers, self.nhid, self.device = nlayers, nhid, device_for(device)
        # Set up the embedding table remotely. With equal seeds, all parts would draw alike.
        self.emb_table_rref = rpc.remote(
            ps, EmbeddingTable, args=(ntoken, ninp, dropout, 3 * seed, device))
        # Set up the LSTM locally.
        torch.manual_seed(3 * seed + 1)
        between_layers = dropout if nlayers > 1 else 0
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=between_layers).to(self.device)
        # Set up the decoder remotely.
        self.decoder_rref = rpc.remote(
            ps, Decoder, args=(ntoken, nhid, dropout, 3 * seed + 2, device))

    def forward(self, input: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor],
                ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Compute scores (T, B, ntoken) and the next state from tokens (T, B) and a state."""
        # Pass the input to the remote embedding table and get the embeddings back.
        # Tutorial: _remote_method(EmbeddingTable.forward, ...). rref.rpc_sync() replaces it today.
        emb = self.emb_table_rref.rpc_sync().forward(input)
        output, hidden = self.rnn(emb.to(self.device), hidden)
        # Pass the output to the remote decoder and get the scores back.
        decoded = self.decoder_rref.rpc_sync().forward(output.cpu())
        return decoded, hidden

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return RRefs to the parameters of the embedding table, the LSTM and the decoder."""
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def set_mode(self, training: bool, seed: int) -> None:
        """Switch dropout on or off in all parts, and seed its masks.

        Tutorial: has no such method; `train()` and `eval()` would reach only the LSTM.
        """
        torch.manual_seed(seed)
        self.train(training)
        for rref in (self.emb_table_rref, self.decoder_rref):
            rref.rpc_sync().set_mode(training, seed + 1)

    def init_hidden(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state before the first token: two zero tensors (nlayers, B, nhid)."""
        shape = self.nlayers, batch_size, self.nhid
        return torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device)


def _parameter_rrefs(module: nn.Module) -> list[rpc.RRef]:
    """Return an RRef to each parameter, on the process that owns the parameters."""
    return [rpc.RRef(param) for param in module.parameters()]


def run_trainer(args: Namespace) -> dict:
    """Train on rank 1; return the metrics."""
    language = load_language(args)
    train_table, val_table = (columns(tokens, args.batch_size)
                              for tokens in (language.train, language.val))
    model = RNNModel(PS_NAME, language.ntoken, args.ninp, args.nhid, args.nlayers, args.dropout,
                     args.seed, args.device)
    # One optimizer for all parameters; each process updates the parameters that it owns.
    # Tutorial: optim.SGD at 0.05, which reaches a validation loss of 2.27 in an epoch; Adam 1.26.
    opt = DistributedOptimizer(Adam, model.parameter_rrefs(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    epochs, initial_val_loss = (
        saving.restore(model, opt, args) if args.resume
        else ([], results.evaluate(model, criterion, val_table, args.bptt)))
    history = results.History(args, train_table, epochs, initial_val_loss)
    for epoch in range(len(epochs), args.epochs):
        # With a dropout seed for each epoch, a resumed run continues as if never stopped.
        model.set_mode(training=True, seed=1_000_000 * args.seed + 1000 * epoch + 2)
        hidden = model.init_hidden(args.batch_size)
        for data, target in get_next_batch(train_table, args.bptt):
            # The context holds the gradients of this step, on the trainer and on the server.
            with history.clock, dist_autograd.context() as context_id:
                hidden[0].detach_()  # keeps the values, drops the graph of the step before
                hidden[1].detach_()
                output, hidden = model(data, hidden)
                # Tutorial: criterion(output, target) took the batch axis for the axis of classes.
                loss = criterion(output.flatten(0, 1), target.flatten())
                # Backward through the remote decoder, the LSTM here, the remote embedding table.
                dist_autograd.backward(context_id, [loss])
                # Every owner of parameters steps. No zero_grad(): the next step has a new context.
                opt.step(context_id)
                history.add(loss, len(data))
        history.end_epoch(results.evaluate(model, criterion, val_table, args.bptt))
        saving.save(model, opt, history, language, args)
    return results.summary(history, model, language, args)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Serve on rank 0; train on rank 1 and return the metrics there."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    # The server only answers the trainer's calls, until both processes reach rpc.shutdown().
    # Tutorial: defines run_trainer, but calls _run_trainer.
    metrics = None
    if rank != 0:
        metrics = run_trainer(args)
    rpc.shutdown()
    return metrics


def build_parser() -> Parser:
    """Return the parser of this program's flags."""
    parser = Parser("rpc_rnn", __doc__, world_size=2, min_world_size=2, rpc=True)
    parser.set_defaults(checkpoint_rank=1)
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--corpus", type=Path, metavar="FILE",
        help="UTF-8 text to learn (default: a synthetic language)")
    add("--epochs", type=count, default=8, metavar="N", help="passes over the training tokens")
    add("--batch_size", type=count, default=20, metavar="N",
        help="columns of text that are read side by side")
    add("--bptt", type=count, default=35, metavar="N", help="tokens of each column in a step")
    add("--ninp", type=count, default=32, metavar="N", help="size of the embeddings")
    add("--nhid", type=count, default=64, metavar="N", help="size of the LSTM's state")
    add("--nlayers", type=count, default=1, metavar="N", help="number of LSTM layers")
    add("--dropout", type=bounded(float, at_least=0, at_most=1), default=0.0, metavar="P",
        help="dropout of the embeddings, between layers and of the LSTM's output")
    add("--lr", type=bounded(float, above=0), default=0.005, help="learning rate")
    parser.add_checkpoint_flags()
    return parser


def require_one_trainer(args: Namespace) -> None:
    """Refuse more than one trainer.

    Raises:
        SystemExit: Status 2, after one line.
    """
    if args.world_size != 2:
        refuse(f"--world_size {args.world_size} must be 2, a server and one trainer", rank=1)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or compare with a single process if `--check` is given.

    Returns:
        The metrics, or the differences of the check, on the reporting process; None elsewhere.
    """
    args = build_parser().parse_args(argv)
    require_one_trainer(args)
    saving.require_checkpoint(args, require_inputs(args))
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
