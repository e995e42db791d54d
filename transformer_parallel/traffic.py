"""Counter of what a rank sends, by a line of a program or inside PyTorch's DDP and FSDP.

    with Traffic() as traffic:
        train_step(...)
    traffic.calls, traffic.sent          # {"all_reduce": 68}, {"all_reduce": 6184512.0}

Every communication of `torch.distributed` is an operator, `c10d::allreduce_` or
`_c10d_functional::all_reduce`. A dispatch mode sees these operators, but not those that DTensor
calls by itself. The operators in `NAMES` count, with the bytes that one of n ranks sends if the
collective goes round a ring, which is the smallest possible number. For a tensor of B bytes:

    all-reduce                              2 B (n-1)/n
    reduce-scatter, all-gather, all-to-all  B (n-1)/n
    send                                    B

B is the full tensor; of uneven parts, an all-to-all sends all but the rank's own part.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# Private. PyTorch's own CommDebugMode is built on it; that mode counts calls and no bytes.
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {  # names of operators in torch 2.11 to 2.15, and the names used here
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "all_reduce": "all_reduce",
    "allgather_": "all_gather", "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "send": "send",
}


class Traffic(TorchDispatchMode):
    """Counter of this process's calls and bytes, by the name of the operation.

    Attributes:
        calls: Number of calls of each operation.
        sent: Bytes sent by each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sent = Counter(), Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        """Run an operator, and count it if it sends."""
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = NAMES.get(func.overloadpacket.__name__.rsplit(".", 1)[-1])
            if name is not None:
                self.calls[name] += 1
                self.sent[name] += _sent(name, args, _group_of(args))
        return result


def _group_of(args: tuple) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, str) and arg in dist.distributed_c10d._world.pg_names.values():
            return dist.distributed_c10d._resolve_process_group(arg)
    return dist.group.WORLD


def _sent(name: str, args: tuple, group: dist.ProcessGroup) -> float:
    n = group.size()
    tensors = [_bytes(arg) for arg in args if isinstance(arg, (torch.Tensor, list, tuple))]
    if name == "send":
        return tensors[0]
    if name == "all_reduce":
        return 2 * tensors[0] * (n - 1) / n
    if name == "all_gather":  # the smaller argument is this rank's part
        return min(size for size in tensors if size) * (n - 1)
    if name == "all_to_all":
        return _to_others(args, n, group.rank())
    return max(tensors) * (n - 1) / n


def _to_others(args: tuple, n: int, rank: int) -> float:
    """Return the bytes of an all-to-all's input, without the part for this rank."""
    mine = [arg for arg in args if isinstance(arg, torch.Tensor)][-1].nbytes  # after the output
    parts = [arg for arg in args if isinstance(arg, (list, tuple))][-1]  # after the output's
    stays = parts[rank] / sum(parts) if any(parts) else 1 / n  # without a list, all are equal
    return mine * (1 - stays)


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_bytes(one) for one in value) if isinstance(value, (list, tuple)) else 0
