"""The model of the lesson: its ends on the parameter server, its middle on the trainer (tutorial 6_5, second half)."""

import threading

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common.session import device_for
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel as DDP


def _parameter_rrefs(module):
    """An RRef for each parameter, to be made where the parameters are."""
    return [RRef(param) for param in module.parameters()]


class Part(nn.Module):
    """What a trainer asks of a part of its model that lives on the server; tensors come and go on the CPU."""

    def parameter_rrefs(self):
        """What the distributed optimizer needs to know of the parameters: where they are."""
        return _parameter_rrefs(self)

    def set_mode(self, training, seed):
        """Switch dropout on or off, here where it happens; `seed` is that of its masks."""
        torch.manual_seed(seed)
        self.train(training)  # not called by the trainer itself: train() returns the module, which would travel

    def average_gradients(self, context_ids):
        """Average what several backward passes have left here for each parameter, into the first context."""
        first, *others = map(dist_autograd.get_gradients, context_ids)
        for param in self.parameters():
            for other in others:
                first[param] += other[param]
            first[param] /= len(context_ids)

    def gradients(self, context_id):
        """`{name: gradient}`: they are in the context, not in `.grad`."""
        gradients = dist_autograd.get_gradients(context_id)
        return {name: gradients[param].cpu() for name, param in self.named_parameters()}

    def weights(self):
        """`{name: parameter}`."""
        return {name: tensor.cpu() for name, tensor in self.state_dict().items()}


class EmbeddingTable(Part):
    """Encoding layer of the RNNModel: tokens (T, B) to embeddings (T, B, ninp)."""

    def __init__(self, ntoken, ninp, dropout, seed, device):
        super().__init__()
        self.device = device_for(device)  # of the process in which it is made: the server
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        # A generator of its own: the server makes both parts at the same time, in two threads.
        self.encoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.to(self.device)

    def forward(self, input):
        """On the server's device, if it has one; RPC carries CPU tensors: move them at the border."""
        return self.drop(self.encoder(input.to(self.device))).cpu()


class Decoder(Part):
    """Decoding layer of the RNNModel: states (T, B, nhid) to scores (T, B, ntoken)."""

    def __init__(self, ntoken, nhid, dropout, seed, device):
        super().__init__()
        self.device = device_for(device)
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.bias.data.zero_()
        self.decoder.weight.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(seed))
        self.to(self.device)

    def forward(self, output):
        """Like `EmbeddingTable.forward`."""
        return self.decoder(self.drop(output.to(self.device))).cpu()


_parts, _parts_lock = {}, threading.Lock()


def the_only(part_class, *args):
    """On the server: the run's only `part_class`, made for whichever trainer asks first."""
    with _parts_lock:
        if part_class not in _parts:
            _parts[part_class] = part_class(*args)
        return _parts[part_class]


class RNNModel(nn.Module):
    """A language model on two processes: RPC stands where a model on two GPUs has `Tensor.to(device)`."""

    def __init__(self, ps, ntoken, ninp, nhid, nlayers, dropout=0.5, seed=0, device="auto"):
        super().__init__()
        self.nlayers, self.nhid = nlayers, nhid
        self.device = device_for(device)
        # The embedding table, remotely.
        self.emb_table_rref = rpc.remote(ps, the_only, args=(EmbeddingTable, ntoken, ninp, dropout, seed, device))
        # The LSTM, locally. With several trainers, DDP keeps their replicas equal.
        self.rnn = local_lstm(ninp, nhid, nlayers, dropout, seed).to(self.device)
        self.lstm = self.rnn
        if dist.is_initialized():
            self.rnn = DDP(self.lstm, device_ids=[self.device] if self.device.type == "cuda" else None)
        # The decoder, remotely.
        self.decoder_rref = rpc.remote(ps, the_only, args=(Decoder, ntoken, nhid, dropout, seed, device))

    def forward(self, input, hidden):
        """Tokens (T, B) and a state to scores (T, B, ntoken) and the next state."""
        # Pass the input to the remote embedding table and get the embeddings back.
        emb = self.emb_table_rref.rpc_sync().forward(input)
        output, hidden = self.rnn(emb.to(self.device), hidden)
        # Pass the output to the remote decoder and get the scores back.
        decoded = self.decoder_rref.rpc_sync().forward(output.cpu())
        return decoded, hidden

    def init_hidden(self, batch_size):
        """The state before the first token: twice (nlayers, B, nhid)."""
        return tuple(torch.zeros(self.nlayers, batch_size, self.nhid, device=self.device) for _ in range(2))

    def parameter_rrefs(self):
        """RRefs of all parameters, wherever they are."""
        remote_params = []
        # Get RRefs of the embedding table.
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        # Make RRefs of the local parameters.
        remote_params.extend(_parameter_rrefs(self.lstm))
        # Get RRefs of the decoder.
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def set_mode(self, training, seed):
        """Like `Part.set_mode`, for the whole model."""
        torch.manual_seed(seed)
        self.train(training)
        for rref in (self.emb_table_rref, self.decoder_rref):
            rref.rpc_sync().set_mode(training, seed)

    def average_gradients(self, context_ids):
        """Average what the backward passes of several trainers have left on the server, into the first's context."""
        for rref in (self.emb_table_rref, self.decoder_rref):
            rref.rpc_sync().average_gradients(context_ids)

    def gradients(self, context_id):
        """`{name: gradient}` of all parameters, fetched from this context wherever it holds them."""
        gradients = dist_autograd.get_gradients(context_id)
        local = {name: gradients[param].cpu() for name, param in self.lstm.named_parameters()}
        return joined(self.emb_table_rref.rpc_sync().gradients(context_id), local,
                      self.decoder_rref.rpc_sync().gradients(context_id))

    def weights(self):
        """`{name: parameter}` of all parameters, with the names that they have in a `LocalRNNModel`."""
        local = {name: tensor.cpu() for name, tensor in self.lstm.state_dict().items()}
        return joined(self.emb_table_rref.rpc_sync().weights(), local, self.decoder_rref.rpc_sync().weights())

    def load_weights(self, weights):
        """Put everything back to where it belongs."""
        for part, load in (("emb_table", self.emb_table_rref.rpc_sync().load_state_dict),
                           ("rnn", self.lstm.load_state_dict),
                           ("decoder", self.decoder_rref.rpc_sync().load_state_dict)):
            load({name.removeprefix(f"{part}."): tensor for name, tensor in weights.items() if name.startswith(part)})


def joined(emb_table, rnn, decoder):
    """The dicts of the three parts as one."""
    parts = {"emb_table": emb_table, "rnn": rnn, "decoder": decoder}
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def local_lstm(ninp, nhid, nlayers, dropout, seed):
    """The same weights on every trainer."""
    torch.manual_seed(seed)
    return nn.LSTM(ninp, nhid, nlayers, dropout=dropout if nlayers > 1 else 0)  # it is dropout between layers
