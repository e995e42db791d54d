"""main.py with several trainers: one pair of tables for all, and the step of their global batch.

Each trainer reads columns of its own. DDP keeps the trainers' LSTMs equal: it averages their
gradients in the backward pass. The tables exist once, on the server, where each trainer's backward
pass leaves gradients in a context of its own. These are averaged before the step, and nobody reads
a table while it changes:

    dist_autograd.backward(context_id, [loss])
    average_table_gradients(model, context_id)    waits for all; the first context has the average
    opt.step(context_id)                          the first trainer's optimizer steps the tables
    dist.barrier()                                now the next step may look them up

The shorter way, where everyone steps at will, ends in "modified by an inplace operation".

    python rpc_rnn/several_trainers.py --world_size 3          two trainers, all processes here
    python rpc_rnn/several_trainers.py --check                 the same numbers as one process?
    torchrun --nproc_per_node 3 rpc_rnn/several_trainers.py    under torchrun

It ends with: loss 2.30 -> ... | validation perplexity ... | ..., 9 RPC round trips a step

A step reads the columns of all trainers. On 2 cores, where trainers wait for each other and for the
server, two make together no more steps a second than one. It is for trainers on machines of their
own.
"""

import threading
from argparse import Namespace

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common.cli import Parser
from common.program import run_program
from common.session import device_for, group_options, rpc_options
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from rpc_rnn import main as tutorial
from rpc_rnn.data import require_inputs
from rpc_rnn.main import Decoder, EmbeddingTable, role_name
from rpc_rnn.results import finish
from rpc_rnn.saving import require_checkpoint

_parts = {}  # on the server: what the trainers share, by its class
_parts_lock = threading.Lock()


def get_or_create(part_class: type[tutorial.Part], *args) -> tutorial.Part:
    """Return the server's one `part_class`, made for whichever trainer asks first."""
    with _parts_lock:
        part = _parts.get(part_class)
        if part is None:
            part = _parts[part_class] = part_class(*args)
        return part


class SharedRNNModel(tutorial.RNNModel):
    """Has an LSTM of its own, and one pair of tables with the models of all other trainers."""

    def __init__(self, ps: str, ntoken: int, ninp: int, nhid: int, nlayers: int,
                 dropout: float = 0.5, seed: int = 0, device: str = "auto") -> None:
        nn.Module.__init__(self)  # not RNNModel's: each trainer would make tables of its own
        self.nlayers, self.nhid, self.device = nlayers, nhid, device_for(device)
        self.emb_table_rref = rpc.remote(
            ps, get_or_create, args=(EmbeddingTable, ntoken, ninp, dropout, 3 * seed, device))
        torch.manual_seed(3 * seed + 1)  # the same weights on every trainer
        between_layers = dropout if nlayers > 1 else 0
        rnn = nn.LSTM(ninp, nhid, nlayers, dropout=between_layers).to(self.device)
        self.rnn = DDP(rnn, device_ids=[self.device] if self.device.type == "cuda" else None)
        self.decoder_rref = rpc.remote(
            ps, get_or_create, args=(Decoder, ntoken, nhid, dropout, 3 * seed + 2, device))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        """Return RRefs of all parameters on the first trainer, elsewhere those of the LSTM."""
        if dist.get_rank() == 0:
            return super().parameter_rrefs()
        return tutorial._parameter_rrefs(self.rnn)

    def make_optimizer(self, args: Namespace) -> DistributedOptimizer:
        """Make an optimizer for the global batch; only the first trainer's has the tables."""
        return GlobalBatchOptimizer(self, tutorial.Adam, self.parameter_rrefs(), lr=args.lr)


class GlobalBatchOptimizer(DistributedOptimizer):
    """Steps with the average of all trainers.

    Args:
        model: the `SharedRNNModel` of this trainer.
        others: as for `DistributedOptimizer`.
    """

    def __init__(self, model: SharedRNNModel, *others, **options) -> None:
        super().__init__(*others, **options)
        self.model = model

    def step(self, context_id: int) -> None:
        """Step when all trainers have gradients; return when all have stepped."""
        average_table_gradients(self.model, context_id)
        super().step(context_id)
        dist.barrier()  # nobody looks up the tables before they have changed


def average_table_gradients(model: SharedRNNModel, context_id: int) -> None:
    """Average, in the first trainer's context, what all backward passes have left on the server.

    Args:
        model: of this trainer.
        context_id: of this trainer's step.
    """
    mine = torch.tensor([context_id], device=model.device)
    gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)  # also a barrier: everyone's backward has ended
    if dist.get_rank() == 0:
        context_ids = [int(context_id) for context_id in gathered]
        for rref in (model.emb_table_rref, model.decoder_rref):
            rpc.rpc_sync(rref.owner(), _average, args=(rref, context_ids))


def _average(part_rref: rpc.RRef, context_ids: list[int]) -> None:
    """Average the gradients of a part, on the server, into the first context."""
    first, *others = map(dist_autograd.get_gradients, context_ids)
    for param in part_rref.local_value().parameters():
        for other in others:
            first[param] += other[param]
        first[param] /= len(context_ids)


def run_worker(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Serve on rank 0; elsewhere train. The first trainer returns the metrics."""
    rpc.init_rpc(role_name(rank, world_size), rank=rank, world_size=world_size,
                 rpc_backend_options=rpc_options(args, tutorial.RPC_THREADS))
    metrics = None
    if rank != 0:
        # A group for DDP, in which rank 1 is first.
        dist.init_process_group(**group_options(args, device_for(args.device)), rank=rank - 1,
                                world_size=world_size - 1)
        metrics = tutorial.run_trainer(rank, world_size, args, SharedRNNModel)
        dist.destroy_process_group()  # no DDP may be left: pytorch/pytorch issue 56297
    rpc.shutdown()
    return metrics


def build_parser() -> Parser:
    """Return the parser of this program's flags: those of main.py, for more processes."""
    parser = tutorial.build_parser("rpc_rnn/several_trainers", __doc__)
    parser.set_defaults(world_size=3)
    return parser


def main(argv: list[str] | None = None) -> dict | None:
    """Train, or `--check`; return metrics or differences where they are reported, else None."""
    args = build_parser().parse_args(argv)
    require_checkpoint(args, require_inputs(args))
    return run_program(run_worker, args, role_name, finish)


if __name__ == "__main__":
    main()
