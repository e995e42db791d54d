"""What goes into `rpc.init_rpc` and `dist.init_process_group`, and where a worker computes."""

import os
import threading
from datetime import timedelta

import torch
from common.worker_env import core_count
from torch.distributed import rpc


def rpc_options(args, num_worker_threads=16):
    """The options of `rpc.init_rpc`: where the workers meet, how long a call may take.

    Args:
        args: the parsed flags; `--timeout` is the limit of every call that has none of its own.
        num_worker_threads: how many incoming calls this process executes at a time.
    """
    return rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["INIT_METHOD"], rpc_timeout=args.timeout,
        num_worker_threads=num_worker_threads, _transports=_transports())


def group_options(args, device="cpu"):
    """The options of `dist.init_process_group`, as a dict of its keyword arguments.

    They are the backend, where the ranks meet, and how long a collective may take.

    Args:
        args: the parsed flags; `--timeout` is the limit.
        device: where the tensors of the collectives live; see `backend_for`.
    """
    return {"backend": backend_for(device), "init_method": os.environ["INIT_METHOD"],
            "timeout": timedelta(seconds=args.timeout)}


def _transports():
    """TensorPipe's ways to send, or None for all. `RPC_TRANSPORTS` in the environment decides.

    Shared memory (shm) is the fastest, but a thread polls it all the time. Between polls it lets
    the others of its session run. Processes that one command has started share a session. Under
    torchrun and in terminals of their own they do not, and where they outnumber the cores, polling
    would take the time of those that have work to do (Linux, sched_autogroup): ddp_rpc_hybrid
    became up to twice as slow. There it is TCP alone (uv).
    """
    if chosen := os.environ.get("RPC_TRANSPORTS"):
        return chosen.split(",")  # common/cli.py has refused all that do not exist
    started_here = os.environ["INIT_METHOD"].startswith("file://")
    crowded = int(os.environ["LOCAL_WORLD_SIZE"]) > core_count()
    return ["uv"] if crowded and not started_here else None


def wait_all(futures):
    """What all futures bring, in order. Raises what the first one to fail brings, at once.

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


def device_for(choice):
    """The torch.device of this process for `--device auto|cpu|cuda`; ranks share too few GPUs."""
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def backend_for(device):
    """`nccl` only when every rank of this machine has a GPU of its own, else `gloo`."""
    own_gpu = (torch.device(device).type == "cuda"
               and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count())
    if own_gpu:
        torch.cuda.set_device(device)  # where nccl's barriers and object collectives put tensors
    return "nccl" if own_gpu else "gloo"
