"""Join a process group or an RPC world, do the work of a `with` block, and leave: never hang, in either direction."""

import contextlib
import os
import time
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import rpc

from common.place import core_count

_goodbye = torch.futures.Future()  # completed once this process has left its `with rpc_session(...)` block


@contextlib.contextmanager
def process_group(rank, world_size, timeout, device="cpu"):
    """A process group for the length of a `with` block (tutorials 6_3, 6_4): gloo, or nccl where it can be.

    Args:
        rank, world_size: of this process and of the group, which may be smaller than the RPC world beside it.
        timeout: seconds that joining or any one collective may wait for the others.
        device: where the tensors of the collectives live.

    Yields:
        The backend's name.
    """
    backend = backend_for(device)
    if backend == "nccl":
        torch.cuda.set_device(device)  # where nccl's barriers and object collectives put their tensors
    limit = timedelta(seconds=timeout)
    # A tcp:// store is opened by rank 0 of all processes, which need not be in this group, nor be its rank 0.
    store = _tcp_store(timeout, wait_for_workers=False)
    if store is None:
        store, _, _ = next(dist.rendezvous(os.environ["INIT_METHOD"], rank, world_size, timeout=limit))
    store = dist.PrefixStore("process group", store)  # apart from the keys of the RPC world
    dist.init_process_group(backend, store=store, timeout=limit, rank=rank, world_size=world_size)
    yield backend
    dist.destroy_process_group()  # not after an error: it would only make the others fail first


@contextlib.contextmanager
def rpc_session(name, rank, world_size, timeout, num_worker_threads=16):
    """Make this process the RPC worker `name` for the length of a `with` block (tutorials 6_5 to 6_9).

    A passive role (an observer, a parameter server) has an empty block: it serves until everyone has left theirs.

    Args:
        name: unique among the workers.
        rank, world_size: of this process and of the RPC world.
        timeout: seconds that joining, leaving or any one RPC may take; a call may pass its own `timeout`.
        num_worker_threads: how many incoming RPCs this process executes at a time.

    Raises:
        RuntimeError: on joining, if the others do not come in time; on leaving, if one of them died.
    """
    global _goodbye
    _goodbye = torch.futures.Future()
    # The gloo group in which the workers get to know each other would wait half an hour; torch gives no other handle.
    rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["INIT_METHOD"], rpc_timeout=timeout, num_worker_threads=num_worker_threads,
        _transports=_transports(),
    )  # fmt: skip
    try:
        # init_rpc alone would wait half an hour for a missing process at a tcp:// store.
        store = _tcp_store(timeout, wait_for_workers=True)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    except RuntimeError as error:
        raise RuntimeError(f"not all {world_size} workers have joined within {timeout:g} s") from error
    yield
    # Only after a block without error: rpc.shutdown waits for all workers, also for one that is dead. So wait for
    # everyone's goodbye first. The call is open as long as the other works, however long (timeout=0), and it fails
    # at once when the other dies.
    everyone = [worker.name for worker in rpc.api._get_current_rpc_agent().get_worker_infos()]
    farewells = {other: rpc.rpc_async(other, _until_goodbye, timeout=0) for other in everyone if other != name}
    _goodbye.set_result(None)
    for other, farewell in farewells.items():
        try:
            farewell.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{other} ended without a goodbye") from error
    rpc.shutdown(timeout=timeout)
    if store is not None:  # rank 0 serves the store, in which the others' shutdown may still have to look something up
        left, deadline = store.add("left", 1), time.monotonic() + timeout
        while rank == 0 and left < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add("left", 0)


@rpc.functions.async_execution
def _until_goodbye():
    return _goodbye


def _transports():
    """TensorPipe's ways to send, or None for all: shared memory is the fastest, but a thread polls it all the time.

    Between polls the thread lets the others of its session run. Processes that one command has started share a session.
    Under torchrun and in terminals of their own they do not, and where they outnumber the cores, polling would take the
    time of those that have work to do (Linux, sched_autogroup): ddp_rpc_hybrid became two to four times as slow.
    """
    started_here = os.environ["INIT_METHOD"].startswith("file://")
    crowded = int(os.environ["LOCAL_WORLD_SIZE"]) > core_count()
    return ["uv"] if crowded and not started_here else None  # uv: TCP


def _tcp_store(timeout, wait_for_workers):
    """The store of a run whose ranks were started by hand, or None: its server is rank 0 of all processes."""
    url = urlparse(os.environ["INIT_METHOD"])
    if url.scheme != "tcp":
        return None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(url.hostname, url.port, world_size, rank == 0, limit, wait_for_workers, multi_tenant=True)


def device_for(choice):
    """The torch.device of this process for `--device auto|cpu|cuda`; ranks share GPUs when there are fewer."""
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def backend_for(device):
    """`nccl` only when every rank of this machine has a GPU of its own, else `gloo`, which also shares one."""
    own_gpu = torch.device(device).type == "cuda" and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    return "nccl" if own_gpu else "gloo"
