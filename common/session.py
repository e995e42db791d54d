"""What goes into `rpc.init_rpc` and `dist.init_process_group`, and where a worker computes."""

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
        args: the parsed flags; `--timeout` is the limit of every call that has none of its own.
        num_worker_threads: how many incoming calls this process executes at a time.
    """
    # RPC_TRANSPORTS is the user's, or common/environment.py has set it. (If this private argument
    # goes, RPC uses all transports that it can, shared memory first.)
    more, transports = {}, os.environ.get("RPC_TRANSPORTS")
    if transports and "_transports" in signature(rpc.TensorPipeRpcBackendOptions).parameters:
        more["_transports"] = transports.split(",")
    return rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["INIT_METHOD"], rpc_timeout=args.timeout,
        num_worker_threads=num_worker_threads, **more)


def serving_options(args: Namespace) -> "rpc.TensorPipeRpcBackendOptions":
    """Make the `rpc_options` of a process on which all others compute.

    It has a thread for each of them, so that who waits there keeps nobody out, and the threads keep
    activations of a few megabytes that they free: without that, steps of param_server/main.py took
    1.4 times as long (2 cores).
    """
    keep_memory(blocks_up_to=2**25)
    return rpc_options(args, num_worker_threads=16 + args.world_size)


def group_options(args: Namespace, device: torch.device | str = "cpu") -> dict:
    """Make the options of `dist.init_process_group`, as a dict of its keyword arguments.

    They are the backend, where the ranks meet, and how long a collective may take.

    Args:
        args: the parsed flags; `--timeout` is the limit.
        device: where the tensors of the collectives live; see `backend_for`.
    """
    backend = backend_for(device)
    return {"backend": backend, "init_method": os.environ["INIT_METHOD"],
            "timeout": timedelta(seconds=args.timeout),
            "device_id": torch.device(device) if backend == "nccl" else None}  # of its barriers


def wait_all(futures: Sequence[torch.futures.Future]) -> list:
    """Return what all futures bring, in order; raise at once what the first one to fail brings.

    `torch.futures.wait_all` would wait for all others first: for a trainer that waits for the one
    that has failed.
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
            except Exception as error:  # of whatever type it was there
                if not over.done():
                    over.set_exception(error)

    for future in futures:
        future.add_done_callback(one_is_done)
    if futures:
        over.wait()
    return [future.value() for future in futures]


def device_for(choice: str) -> torch.device:
    """Return this process's device for `--device auto|cpu|cuda`; ranks share too few GPUs."""
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def device_of_group(args: Namespace) -> torch.device:
    """Return a GPU where each rank has one of its own, with nccl; else the CPU, for gloo.

    Every machine decides for itself: where one has too few GPUs, all need `--device cpu`.
    """
    device = device_for(args.device)
    return torch.device("cpu") if backend_for(device) == "gloo" else device


def backend_for(device: torch.device | str) -> str:
    """Choose `nccl` where every rank of this machine has a GPU of its own, else `gloo`."""
    own_gpu = (torch.device(device).type == "cuda"
               and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count())
    if own_gpu:
        torch.cuda.set_device(device)  # where nccl's barriers and object collectives put tensors
    return "nccl" if own_gpu else "gloo"


def keep_memory(blocks_up_to: int | None = None) -> None:
    """Let the C library keep freed memory.

    Giving it back and getting it again can cost a third of a worker's time: glibc gives back large
    blocks, and in the threads in which RPC runs smaller ones too; the system then clears the same
    pages again and again. Elsewhere there is nothing to do.

    Args:
        blocks_up_to: the size in bytes of what should be kept in each thread. By default blocks of
            any size are kept for all threads together, which activations of many megabytes need;
            call this before there are threads.
    """
    options = (((M_ARENA_MAX, 1), (M_MMAP_MAX, 0)) if blocks_up_to is None
               else ((M_MMAP_THRESHOLD, blocks_up_to),))
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in (*options, (M_TRIM_THRESHOLD, 2**30)):
            mallopt(option, value)
