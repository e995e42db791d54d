"""main.py with fewer round trips: the server looks up the next tokens when it has stepped.

A step of `main.py` needs the embedding table three times: to look up the tokens, to take the
gradient back, to step. From the gradient on to the next look-up, nothing is missing on the server
but the next tokens. So one RPC brings these, too, and does all of it:

    rank 0 "ps"                                          rank 1 "trainer"
    +-----------------------------+                      +---------------------------------------+
    |                             |  <-- output ------   | with dist_autograd.context() as id:   |
    | Decoder                     |  --- scores ----->   |   output, hidden = model(data, hidden)|
    |                             |  <-- gradients -->   |   dist_autograd.backward(id, [loss])  |
    | step_and_look_up(id, ...):  |  <-- gradient of --  |   opt.step(id):                       |
    |   backward of the embeddings|      embeddings,     |     rpc.rpc_async(step_and_look_up)   |
    |   step of table and decoder |      next tokens     |     step of the LSTM                  |
    |   look-up of the next piece |  --- embeddings -->  |     future.wait()                     |
    +-----------------------------+                      +---------------------------------------+

    python rpc_rnn/prefetch.py                5 round trips a step instead of 7
    python rpc_rnn/prefetch.py --check        the same numbers as one process?

It ends with: loss 2.30 -> 1.20 (...) | validation perplexity 3.33 | ..., 5 RPC round trips a step

It makes 1.06 times the steps/s of main.py (`python -m benchmarks.rpc_rnn`), and 1.20 times between
machines that are 10 ms apart (`python -m benchmarks.latency`). It costs a second way for gradients,
and one trainer is all there can be: the tables step as soon as its gradient has come.

Nothing is stale: the look-up comes after the step, and draws its dropout mask before the decoder's
next one, as in main.py. What differs is where a gradient is. A context belongs to one step, and the
look-up is made before that of its step exists. So the graph of the embeddings ends on the trainer,
and their gradient goes back as an argument. Ordinary autograd takes it to the table's `.grad`,
where `DistributedOptimizer`'s local optimizer puts those of the context before it steps.
(`dist_autograd.backward()` on the server, in the context of the step, would wait for ever: for the
gradient of the scores, which has come already.)

TorchRec has the same on a large scale. TrainPipelineFusedSparseDist starts the next look-up when
the tables have stepped, while the optimizer of all else does; TrainPipelineSemiSync looks up
earlier, in weights one step old (https://github.com/meta-pytorch/torchrec, train_pipelines.py).
"""

from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed.autograd as dist_autograd
from common.cli import Parser
from common.program import run_program
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn import data
from rpc_rnn import main as tutorial
from rpc_rnn.main import role_name
from rpc_rnn.results import finish
from rpc_rnn.saving import require_checkpoint


class PrefetchingModel(tutorial.RNNModel):
    """Gets its embeddings with the answer to the step before."""

    embeddings = None  # of the piece that is read next
    next_tokens = None  # those of the piece after that, of the one text that this trainer reads

    def forward(self, input: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor],
                ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Do as `RNNModel.forward`; in training, with embeddings that are here already."""
        if not torch.is_grad_enabled():  # validation reads other tokens
            return super().forward(input, hidden)
        if self.embeddings is None:  # of the first piece of an epoch, after set_mode()
            self.embeddings = rpc.rpc_sync(self.emb_table_rref.owner(), look_up,
                                           args=(self.emb_table_rref, input))
        emb = self.embeddings.requires_grad_()  # a leaf of this process's graph
        output, hidden = self.rnn(emb.to(self.device), hidden)
        return self.decoder_rref.rpc_sync().forward(output.cpu()), hidden

    def make_optimizer(self, args: Namespace) -> DistributedOptimizer:
        """Make an optimizer whose step also looks up what the model reads next."""
        # Ordinary ones: torch's functional form would see no `.grad`.
        return PrefetchingOptimizer(self, tutorial.Adam, self.parameter_rrefs(), lr=args.lr)


def get_next_batch(table: torch.Tensor, bptt: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of text; before each, let the model know which tokens follow it."""
    pieces = list(data.get_next_batch(table, bptt))  # views: nothing is copied
    for piece, (following, _) in zip(pieces, [*pieces[1:], (None, None)], strict=True):
        PrefetchingModel.next_tokens = following
        yield piece


class PrefetchingOptimizer(DistributedOptimizer):
    """Steps, and looks up what the model reads next.

    Args:
        model: the `PrefetchingModel` of the one trainer.
        others: as for `DistributedOptimizer`.
    """

    def __init__(self, model: PrefetchingModel, *others, **options) -> None:
        super().__init__(*others, **options)
        self.model = model

    def step(self, context_id: int) -> None:
        """Let every owner of parameters step, and the server look up the next piece."""
        model, (server, here) = self.model, self.remote_optimizers
        gradient = dist_autograd.get_gradients(context_id)[model.embeddings]
        future = rpc.rpc_async(server.owner(), step_and_look_up, args=(
            model.emb_table_rref, server, context_id, gradient, model.next_tokens))
        here.local_value().step(context_id)  # meanwhile
        model.embeddings = future.wait()


def look_up(table_rref: rpc.RRef, tokens: torch.Tensor) -> torch.Tensor:
    """Return, on the server, embeddings without their graph, which waits for their gradient."""
    table = table_rref.local_value()
    table.embeddings = table(tokens)
    return table.embeddings.detach()


def step_and_look_up(table_rref: rpc.RRef, optimizer_rref: rpc.RRef, context_id: int,
                     gradient: torch.Tensor,
                     next_tokens: torch.Tensor | None) -> torch.Tensor | None:
    """End one step and begin the next, on the server.

    Args:
        table_rref: the `EmbeddingTable`, with the embeddings of this step.
        optimizer_rref: the server's local optimizer, of table and decoder.
        context_id: of this step, where the gradients of the decoder are.
        gradient: of the embeddings: shape (T, B, ninp).
        next_tokens: those of the next piece, shape (T, B); None at the end of an epoch.

    Returns:
        Their embeddings, with the weights after this step; None at the end of an epoch.
    """
    table = table_rref.local_value()
    table.zero_grad()  # a context is a new one in each step, .grad is not
    table.embeddings.backward(gradient)
    optimizer_rref.local_value().step(context_id)
    return None if next_tokens is None else look_up(table_rref, next_tokens)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Serve on rank 0; on the other one train, and return the metrics."""
    return tutorial.run_worker(rank, world_size, args, PrefetchingModel, get_next_batch)


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py."""
    return tutorial.build_parser("rpc_rnn/prefetch", __doc__)


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    tutorial.require_one_trainer(args)
    require_checkpoint(args, data.require_inputs(args))
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
