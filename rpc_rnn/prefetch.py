"""`--prefetch`: the server looks up the next piece of text as soon as it has stepped.

A step of `main.py` needs the embedding table three times: to look up the tokens, to take the
gradient back, to step. From the gradient on to the next look-up, nothing is missing on the server
but the next tokens. So one RPC brings these, too, and does all of it:

    rank 0 "ps"                                          rank 1 "trainer"
    +-----------------------------+                      +---------------------------------------+
    |                             |  <-- states ------   | with dist_autograd.context() as id:   |
    | Decoder                     |  --- scores ----->   |   output, hidden = model(data, hidden)|
    |                             |  <-- gradients -->   |   dist_autograd.backward(id, [loss])  |
    | step_and_look_up(id, ...):  |  <-- gradient of --  |   opt.step(id):                       |
    |   backward of the embeddings|      embeddings,     |     rpc.rpc_async(step_and_look_up)   |
    |   step of table and decoder |      next tokens     |     step of the LSTM                  |
    |   look-up of the next piece |  --- embeddings -->  |     future.wait()                     |
    +-----------------------------+                      +---------------------------------------+

    python rpc_rnn/main.py --prefetch            5 round trips a step instead of 7
    python rpc_rnn/main.py --prefetch --check    the same numbers as one process?

Last line: loss 2.30 -> 1.20 (...) | validation perplexity 3.33 | ..., 5 RPC round trips a step

Nothing is stale: the look-up comes after the step, and draws its dropout mask before the decoder's
next one, as without `--prefetch`. What differs is where a gradient is. A context belongs to one
step, and the look-up is made before that of its step exists. So the graph of the embeddings ends on
the trainer, and their gradient goes back as an argument. Ordinary autograd takes it to the table's
`.grad`, where `DistributedOptimizer`'s local optimizer puts those of the context before it steps.
(`dist_autograd.backward()` on the server, in the context of the step, would wait for ever: for the
gradient of the scores, which has come already.)

TorchRec has the same on a large scale. TrainPipelineFusedSparseDist starts the next look-up when
the tables have stepped, while the optimizer of all else does; TrainPipelineSemiSync looks up
earlier, in weights one step old (https://github.com/meta-pytorch/torchrec, train_pipelines.py).
"""

import itertools

import torch
import torch.distributed.autograd as dist_autograd
from common.cli import refuse
from torch.distributed import rpc

from rpc_rnn.data import get_next_batch


class Prefetcher:
    """An optimizer whose step also looks up what the model reads next.

    It replaces the look-up of the model by its own.

    Args:
        model: the `RNNModel` of the only trainer.
        opt: the `DistributedOptimizer` of all its parameters, of a class in
            `saving.OPTIMIZERS_WITH_STATE`: one compiled to TorchScript sees no `.grad`.
    """

    def __init__(self, model, opt):
        self.table_rref, self.remote_optimizers = model.emb_table_rref, opt.remote_optimizers
        self.embeddings, self.next_tokens = None, None
        model.look_up = self.look_up

    def pieces(self, table, bptt):
        """`get_next_batch`, which remembers for the step what follows; nothing after the last."""
        pieces = itertools.chain(get_next_batch(table, bptt), [(None, None)])
        for piece, (self.next_tokens, _) in itertools.pairwise(pieces):
            yield piece

    def look_up(self, tokens):
        """Tokens (T, B) to embeddings (T, B, ninp), where the graph of this process begins."""
        if not torch.is_grad_enabled():  # validation reads other tokens
            return self.table_rref.rpc_sync().forward(tokens)
        if self.embeddings is None:  # of the first piece of an epoch, after set_mode()
            self.embeddings = rpc.rpc_sync(self.table_rref.owner(), look_up,
                                           args=(self.table_rref, tokens))
        return self.embeddings.requires_grad_()

    def step(self, context_id):
        """Every owner of parameters steps, and the server looks up the next piece."""
        server, here = self.remote_optimizers
        gradient = dist_autograd.get_gradients(context_id)[self.embeddings]
        future = rpc.rpc_async(server.owner(), step_and_look_up, args=(
            self.table_rref, server, context_id, gradient, self.next_tokens))
        here.local_value().step(context_id)  # meanwhile
        self.embeddings = future.wait()


def rung(model, opt):
    """What takes the place of the optimizer, and of `get_next_batch`, in `run_trainer`."""
    prefetcher = Prefetcher(model, opt)
    return prefetcher, prefetcher.pieces


def look_up(table_rref, tokens):
    """On the server: embeddings without their graph, which stays until their gradient comes."""
    table = table_rref.local_value()
    table.embeddings = table(tokens)
    return table.embeddings.detach()


def step_and_look_up(table_rref, optimizer_rref, context_id, gradient, next_tokens):
    """On the server: the end of one step and the beginning of the next.

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


def require_one_trainer(args):
    """Refuse more: the tables change when all trainers have brought their gradients.

    Raises:
        SystemExit: 2 after one line.
    """
    if args.prefetch and args.world_size > 2:
        refuse(f"--prefetch requires --world_size 2, one trainer, not {args.world_size}: with "
               "several, the server's step waits for all gradients", rank=1)
