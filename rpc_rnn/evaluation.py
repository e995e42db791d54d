"""What the tutorial leaves out: dropout on and off everywhere, validation, a text of the model."""

import torch
from torch.distributed import rpc

from rpc_rnn import results
from rpc_rnn.data import get_next_batch

SAMPLE_LENGTH = 200  # characters of generated text


def set_mode(model, training, seed, rank=0):
    """Switch dropout on or off in all parts of an `RNNModel`.

    `model.eval()` would reach only the LSTM.

    Args:
        model: the `RNNModel` of this trainer.
        training: whether dropout is on.
        seed: of its masks.
        rank: of this trainer: for each, and for the server, other masks follow from it.
    """
    torch.manual_seed(seed + 2 * rank)
    model.train(training)
    for rref in (model.emb_table_rref, model.decoder_rref):
        rpc.rpc_sync(rref.owner(), _set_mode, args=(rref, training, seed + 2 * rank + 1))


def _set_mode(part_rref, training, seed):
    """On the server."""
    torch.manual_seed(seed)
    # Not called by the trainer: train() returns the module, which would travel.
    part_rref.local_value().train(training)


def evaluate(model, criterion, table, bptt):
    """The mean loss of a token without dropout, over the columns of all trainers.

    Args:
        model, criterion: as in the training.
        table: the tokens of this trainer's columns: shape (length, batch_size).
        bptt: how many rows are read at a time.
    """
    set_mode(model, training=False, seed=0)
    hidden, losses = model.init_hidden(table.size(1)), []
    with torch.no_grad():
        for data, target in get_next_batch(table, bptt):
            output, hidden = model(data, hidden)
            losses.append((criterion(output.flatten(0, 1), target.flatten()).item(), len(data)))
    # Also a barrier: nobody switches dropout on before all trainers are done.
    return results.mean_loss(losses)


def generate(model, language, seed):
    """A text: each character is drawn as likely as the model says, then read as the next input."""
    set_mode(model, training=False, seed=seed)
    hidden, token, sample = model.init_hidden(batch_size=1), language.val[:1].view(1, 1), []
    with torch.no_grad():
        for _ in range(SAMPLE_LENGTH):
            output, hidden = model(token, hidden)
            token = output.view(-1).softmax(dim=0).multinomial(1).view(1, 1)
            sample.append(language.vocabulary[int(token)])
    return "".join(sample)


def with_sample(metrics, model, language, args):
    """The metrics; with `--corpus`, beside them "sample", a text of the model."""
    return metrics | {"sample": generate(model, language, args.seed)} if args.corpus else metrics
