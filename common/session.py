"""Options of `rpc.init_rpc` and `dist.init_process_group`, and the device of a rank."""

import contextlib
import ctypes
import os
import threading
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from inspect import signature

import torch
from torch.distributed import rpc

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # glibc's malloc.h


def rpc_options(args: Namespace, num_worker_threads: int = 16) -> "rpc.TensorPipeRpcBackendOptions":
    """Make the options of `rpc.init_rpc`: where the workers meet, how long a call may take.

    Args:
        args: Parsed flags; `--timeout` limits every call without a timeout of its own.
        num_worker_threads: Number of incoming calls that this process executes at a time.
    """
    # The user or common/environment.py sets RPC_TRANSPORTS. (If torch drops this private argument,
    # RPC uses every transport that it can, shared memory first.)
    more, transports = {}, os.environ.get("RPC_TRANSPORTS")
    if transports and "_transports" in signature(rpc.TensorPipeRpcBackendOptions).parameters:
        more["_transports"] = transports.split(",")
    return rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["INIT_METHOD"], rpc_timeout=args.timeout,
        num_worker_threads=num_worker_threads, **more)


def serving_options(args: Namespace) -> "rpc.TensorPipeRpcBackendOptions":
    """Make the `rpc_options` of a process that computes for all other ranks.

    It has a thread for each rank, so a waiting rank blocks no other one. The threads keep the
    memory of freed activations: without that, steps of param_server/main.py took 1.4 times as long
    (2 cores).
    """
    keep_memory(blocks_up_to=2**25)
    return rpc_options(args, num_worker_threads=16 + args.world_size)


def group_options(args: Namespace, device: torch.device | str = "cpu") -> dict:
    """Make the keyword arguments of `dist.init_process_group`: backend, meeting point, timeout.

    Args:
        args: Parsed flags; `--timeout` limits every collective.
        device: Device of the tensors in the collectives; see `backend_for`.
    """
    backend = backend_for(device)
    return {"backend": backend, "init_method": os.environ["INIT_METHOD"],
            "timeout": timedelta(seconds=args.timeout),
            "device_id": torch.device(device) if backend == "nccl" else None}  # for barriers


def wait_all(futures: Sequence[torch.futures.Future]) -> list:
    """Return the results of all futures, in order; raise the first error as soon as it arrives.

    `torch.futures.wait_all` waits for the remaining futures of `rref.rpc_async()` before it raises.
    One of them may be a trainer that waits for the trainer that failed.
    """
    over, lock, left = torch.futures.Future(), threading.Lock(), len(futures)

    def one_is_done(future):
        nonlocal left
        with lock:
            left -= 1
            try:
                future.value()
                if left == 0 and not over.done():
                    over.set_result(None)
            except Exception as error:  # of any type
                if not over.done():
                    over.set_exception(error)

    for future in futures:
        future.add_done_callback(one_is_done)
    if futures:
        over.wait()
    return [future.value() for future in futures]


def device_for(choice: str) -> torch.device:
    """Return this rank's device for `--device`; if there are too few GPUs, ranks share them."""
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def device_of_group(args: Namespace) -> torch.device:
    """Return this rank's own GPU (with nccl), or the CPU (with gloo) if there are too few GPUs.

    Every machine decides for itself. If one machine has too few GPUs, all need `--device cpu`.
    """
    device = device_for(args.device)
    return torch.device("cpu") if backend_for(device) == "gloo" else device


def backend_for(device: torch.device | str) -> str:
    """Return `nccl` if every rank on this machine has its own GPU, otherwise `gloo`."""
    own_gpu = (torch.device(device).type == "cuda"
               and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count())
    if own_gpu:
        torch.cuda.set_device(device)  # nccl's barriers and object collectives put tensors there
    return "nccl" if own_gpu else "gloo"


def keep_memory(blocks_up_to: int | None = None) -> None:
    """Let the C library keep freed memory.

    glibc returns large blocks to the system, and in the threads of RPC also smaller ones. The
    system then clears the same pages again and again, which can cost a third of a worker's time.
    Other C libraries need nothing.

    Args:
        blocks_up_to: Size in bytes of the blocks that each thread keeps. By default all threads
            together keep blocks of any size, as activations of many megabytes need; in that case,
            call this before there are threads.
    """
    options = (((M_ARENA_MAX, 1), (M_MMAP_MAX, 0)) if blocks_up_to is None
               else ((M_MMAP_THRESHOLD, blocks_up_to),))
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in (*options, (M_TRIM_THRESHOLD, 2**30)):
            mallopt(option, value)
