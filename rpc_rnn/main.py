r"""A language model split over RPC: distributed autograd and optimizer (tutorial 6_5, second half).

The embedding table and the decoder live on a parameter server, the LSTM on the trainer. Forward,
backward and optimizer step each cross the wire, and read like those of a local model.

    rank 0 "ps"                                    rank 1 "trainer"
    +-------------------+  <-- tokens -----------  +----------------------------------------+
    | EmbeddingTable    |  --- embeddings ------>  | with dist_autograd.context() as id:    |
    |                   |  <-- output ---------    |   output, hidden = model(data, hidden) |
    | Decoder           |  --- scores --------->   |   loss = criterion(output, target)     |
    |                   |  <-- their gradient --   |   dist_autograd.backward(id, [loss])   |
    |                   |  --- of the output -->   |                                        |
    |                   |  <-- of embeddings ---   |                                        |
    | gradients of id   |  <-- step(id) --------   |   opt.step(id)                         |
    +-------------------+                          +----------------------------------------+

    python rpc_rnn/main.py                            a synthetic language of known entropy
    python rpc_rnn/main.py --corpus README.ja.md      any text, in any script
    python rpc_rnn/main.py --check                    the same numbers as one process?
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
RPC_THREADS = 4  # that execute incoming calls; with 16, the default, a step takes longer


def role_name(rank: int, world_size: int) -> str:
    """Return the name of a rank: 0 is the parameter server, 1 the trainer."""
    return PS_NAME if rank == 0 else "trainer"


class Part(nn.Module):
    """Stands on the server, as a part of the model whose methods the trainer calls."""

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return an RRef for each parameter of this part."""
        return _parameter_rrefs(self)

    def set_mode(self, training: bool, seed: int) -> None:
        """Do as `RNNModel.set_mode`; unlike `train()`, return no module, which would travel."""
        torch.manual_seed(seed)
        self.train(training)


class EmbeddingTable(Part):
    """Encodes for the RNNModel: tokens (T, B) to embeddings (T, B, ninp)."""

    def __init__(self, ntoken: int, ninp: int, dropout: float, seed: int, device: str) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        # A generator of its own: the server makes both parts at the same time, in two threads.
        self.encoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.device = device_for(device)
        self.to(self.device)  # Tutorial: .cuda()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up tokens. RPC carries CPU tensors: move them at the border."""
        return self.drop(self.encoder(input.to(self.device))).cpu()  # Tutorial: a ) was missing


class Decoder(Part):
    """Decodes for the RNNModel: the LSTM's output (T, B, nhid) to scores (T, B, ntoken)."""

    def __init__(self, ntoken: int, nhid: int, dropout: float, seed: int, device: str) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.bias.data.zero_()
        self.decoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.device = device_for(device)
        self.to(self.device)

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        """Decode the LSTM's output; it comes and goes as in `EmbeddingTable.forward`."""
        return self.decoder(self.drop(output.to(self.device))).cpu()


class Adam(optim.Adam):
    """Is optim.Adam under a name that `DistributedOptimizer` does not know.

    Of a class that it does not know it makes ordinary optimizers. Of torch's own it makes a
    functional form, whose state nobody can fetch for a checkpoint.
    """


class RNNModel(nn.Module):
    """Joins both processes to one model: RPC stands where two GPUs have `Tensor.to(device)`."""

    def __init__(self, ps: str, ntoken: int, ninp: int, nhid: int, nlayers: int,
                 dropout: float = 0.5, seed: int = 0, device: str = "auto") -> None:
        super().__init__()
        self.nlayers, self.nhid, self.device = nlayers, nhid, device_for(device)
        # Set up the embedding table remotely. The seeds differ, or all parts would draw alike.
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
        """Turn tokens (T, B) and a state into scores (T, B, ntoken) and the next state."""
        # Pass the input to the remote embedding table and get the embeddings back.
        # Tutorial: _remote_method(EmbeddingTable.forward, ...), which RRefs have as rpc_sync().
        emb = self.emb_table_rref.rpc_sync().forward(input)
        output, hidden = self.rnn(emb.to(self.device), hidden)
        # Pass the output to the remote decoder and get the scores back.
        decoded = self.decoder_rref.rpc_sync().forward(output.cpu())
        return decoded, hidden

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return RRefs of all parameters: of the embedding table, the LSTM here, the decoder."""
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def set_mode(self, training: bool, seed: int) -> None:
        """Switch dropout on or off in all parts, and seed its masks.

        Tutorial: none; `train()` and `eval()` would reach only the LSTM.
        """
        torch.manual_seed(seed)
        self.train(training)
        for rref in (self.emb_table_rref, self.decoder_rref):
            rref.rpc_sync().set_mode(training, seed + 1)

    def init_hidden(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state before the first token: twice (nlayers, B, nhid)."""
        shape = self.nlayers, batch_size, self.nhid
        return torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device)


def _parameter_rrefs(module: nn.Module) -> list[rpc.RRef]:
    """Make an RRef for each parameter, where the parameters are."""
    return [rpc.RRef(param) for param in module.parameters()]


def run_trainer(args: Namespace) -> dict:
    """Train; return the metrics."""
    language = load_language(args)
    train_table, val_table = (columns(tokens, args.batch_size)
                              for tokens in (language.train, language.val))
    model = RNNModel(PS_NAME, language.ntoken, args.ninp, args.nhid, args.nlayers, args.dropout,
                     args.seed, args.device)
    # One optimizer for parameters anywhere, each of which steps where it is.
    opt = DistributedOptimizer(Adam, model.parameter_rrefs(), lr=args.lr)  # Tutorial: optim.SGD
    criterion = nn.CrossEntropyLoss()
    epochs, initial_val_loss = (
        saving.restore(model, opt, args) if args.resume
        else ([], results.evaluate(model, criterion, val_table, args.bptt)))
    history = results.History(args, train_table, epochs, initial_val_loss, opt)
    for epoch in range(len(epochs), args.epochs):
        # A seed for the dropout of each epoch: a resumed training goes on as if never stopped.
        model.set_mode(training=True, seed=1_000_000 * args.seed + 1000 * epoch + 2)
        hidden = model.init_hidden(args.batch_size)
        history.begin_epoch()
        for data, target in get_next_batch(train_table, args.bptt):
            # The context holds the gradients of this step, on the trainer and on the server.
            with dist_autograd.context() as context_id:
                hidden[0].detach_()  # the values go on, their history ends
                hidden[1].detach_()
                output, hidden = model(data, hidden)
                # Tutorial: criterion(output, target), whose axis of classes was the batch.
                loss = criterion(output.flatten(0, 1), target.flatten())
                # Through the decoder over there, the LSTM here, the embedding table over there.
                dist_autograd.backward(context_id, [loss])
                # Every owner of parameters steps. No zero_grad(): the next step has a new context.
                opt.step(context_id)
                history.add(loss, len(data), context_id)
        history.end_epoch(results.evaluate(model, criterion, val_table, args.bptt))
        saving.save(model, opt, history, language, args)
    return results.summary(history, model, language, args)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Serve on rank 0; on rank 1 train, and return the metrics."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, RPC_THREADS))
    # The server has nothing to do here: it answers the trainer's calls until that has finished.
    # Tutorial: defines run_trainer, and calls _run_trainer.
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
    add("--corpus", type=Path, metavar="FILE", help="a UTF-8 text (default: a synthetic language)")
    add("--epochs", type=count, default=8, metavar="N", help="times that every token is trained on")
    add("--batch_size", type=count, default=20, metavar="N", help="columns that a trainer reads")
    add("--bptt", type=count, default=35, metavar="N", help="tokens of a column in a step")
    add("--ninp", type=count, default=32, metavar="N", help="size of the embeddings")
    add("--nhid", type=count, default=64, metavar="N", help="size of the LSTM's state")
    add("--nlayers", type=count, default=1, metavar="N", help="layers of the LSTM")
    add("--dropout", type=bounded(float, at_least=0, at_most=1), default=0.0, metavar="P",
        help="of embeddings, between layers, of the LSTM's output; small texts need some")
    add("--lr", type=bounded(float, above=0), default=0.005, help="learning rate")
    parser.add_checkpoint_flags()
    return parser


def require_one_trainer(args: Namespace) -> None:
    """Refuse more trainers than one.

    Raises:
        SystemExit: 2 after one line.
    """
    if args.world_size != 2:
        refuse(f"--world_size {args.world_size} must be 2, a server and one trainer", rank=1)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_one_trainer(args)
    saving.require_checkpoint(args, require_inputs(args))
    return run_program(run_worker, args, role_name, results.finish)


if __name__ == "__main__":
    main()
