"""The same model in one process, without RPC: what `main.py --check` holds the split one against."""

import torch
from torch import nn

from rpc_rnn.language import columns, get_next_batch, load_language
from rpc_rnn.model import Decoder, EmbeddingTable, local_lstm


class LocalRNNModel(nn.Module):
    """The three parts together; it also loads the "model" of a checkpoint."""

    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.5, seed=0):
        super().__init__()
        self.emb_table = EmbeddingTable(ntoken, ninp, dropout, seed, "cpu")
        self.rnn = local_lstm(ninp, nhid, nlayers, dropout, seed)
        self.decoder = Decoder(ntoken, nhid, dropout, seed, "cpu")

    def forward(self, input, hidden=None):
        """Like `RNNModel.forward`."""
        output, hidden = self.rnn(self.emb_table(input), hidden)
        return self.decoder(output), hidden


def by_part(loss, gradients, weights):
    """Numbers to compare: `{what: list}`, with the gradients and the weights of each of the three parts."""
    numbers = {"loss": [loss]}
    for what, tensors in (("gradient", gradients), ("weights after a step", weights)):
        for part in ("emb_table", "rnn", "decoder"):
            of_part = [tensor.flatten() for name, tensor in tensors.items() if name.startswith(part)]
            numbers[f"{part}, {what}"] = torch.cat(of_part).tolist()
    return numbers


def step_alone(optimizer_class, args):
    """One step without dropout on the columns of all trainers; its loss, gradients and new weights `by_part`."""
    n_trainers, language = args.world_size - 1, load_language(args)
    tables = [columns(language.train, args.batch_size, trainer, n_trainers) for trainer in range(n_trainers)]
    data, target = next(get_next_batch(torch.cat(tables, dim=1), args.bptt))
    model = LocalRNNModel(language.ntoken, args.ninp, args.nhid, args.nlayers, 0, args.seed)
    optimizer = optimizer_class(model.parameters(), lr=args.lr)
    output, _ = model(data)
    loss = nn.CrossEntropyLoss()(output.flatten(0, 1), target.flatten())
    loss.backward()
    optimizer.step()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    return by_part(loss.item(), gradients, model.state_dict())
