"""The state that every worker is in: environment variables, share of cores and memory, quiet."""

import contextlib
import ctypes
import functools
import logging
import math
import os
import sys
import warnings
from pathlib import Path

import torch
from common.network import interface_towards
from torch.distributed import rpc

# An environment variable: what script the fork server should import.
MAIN_PATH = "DISTRIBUTED_TUTORIALS_MAIN"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # glibc's malloc.h


def enter(rank, world_size, local_rank, local_world_size, init_method, master_addr):
    """Bring this process into the state that every worker is in, whoever started it.

    Args:
        rank, world_size: of this process, and of all processes.
        local_rank, local_world_size: the same on this machine alone.
        init_method: where the processes meet, for `common.session`.
        master_addr: the machine of rank 0, if there are several machines.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "INIT_METHOD")
    values = (rank, world_size, local_rank, local_world_size, init_method)
    os.environ.update(zip(names, map(str, values), strict=True))
    if init_method.startswith("tcp://"):
        # torch's word for: a launcher serves the store, no rank.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # RPC executes what it is sent: on one machine it must not listen where others can reach it. On
    # several, gloo and RPC would listen where the machine's own name points to, on many systems
    # loopback, where nobody can reach them.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = loopback if local_world_size == world_size else interface_towards(master_addr)
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if interface is not None:
            os.environ.setdefault(name, interface)
    # Every process would take all cores otherwise: the largest single cost of RPC examples on small
    # machines.
    torch.set_num_threads(users_threads() or max(1, core_count() // local_world_size))
    quiet()
    # RPC prints every exception where it was raised, also those that only follow from another one.
    # The launcher prints the one that counts, which has come back to the caller.
    rpc.internal.print = lambda *_, **__: None


def reproducible(args):
    """On a GPU, compute float32 as float32, and the same again: for `--check` and exact resumes."""
    if args.check or getattr(args, "checkpoint", None):
        # True by default: convolutions and LSTMs with 10 bits.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def users_threads():
    """OMP_NUM_THREADS if the user has set it, else None: torchrun by itself sets it to 1."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if not setting.isdecimal() or int(setting) == 0:
        return None
    if torch.distributed.is_torchelastic_launched() and setting == "1":
        # What torchrun itself was started with; not on every system.
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{os.getppid()}/environ").read_bytes()
            if b"\0OMP_NUM_THREADS=" not in b"\0" + environ:
                return None
    return int(setting)


def run_prefix(launcher=None):
    """How the names of a launcher's temporary folders begin; by default, of this process's."""
    return f"distributed-tutorials-{launcher or os.getpid()}-"


def core_count():
    """CPU cores this process may use: in a container, under taskset or a cgroup's quota not all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, math.ceil(min(cores, quota)))


def cgroup_quota(root, own):
    """The cores' worth of time that the cgroups of this process grant it (`docker --cpus 1.5`).

    Args:
        root: where the cgroups are mounted.
        own: the file that names those of this process.

    Returns:
        A number; infinity where there is no limit.
    """
    quota = math.inf
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mounted = root / "cpu" if controllers else root  # controllers: cgroups' first version
            group = mounted / path.lstrip("/")
            # Every group above it may have a limit, too.
            while group is not None and group.is_relative_to(mounted):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    if controllers:
                        limit, period = ((group / f"cpu.cfs_{what}_us").read_text()
                                         for what in ("quota", "period"))
                    else:
                        limit, period = (group / "cpu.max").read_text().split()
                    quota = min(quota, int(limit) / int(period)) if int(limit) > 0 else quota
                group = None if group == mounted else group.parent
    return quota


def keep_memory(blocks_up_to=None):
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


def quiet():
    """Filter exactly the warnings that torch gives in a normal run of these examples."""
    # init_rpc hands its own gloo Backend to a collective that would rather have a ProcessGroup.
    warnings.filterwarnings("ignore", message=r"You are using a Backend .* as a ProcessGroup")
    # DistributedOptimizer compiles optimizers to TorchScript, which is deprecated, and says so on
    # any filter; where it does not compile one, because of its class or because this Python has no
    # TorchScript any more, it warns of that.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated",
                            category=DeprecationWarning)
    if getattr(warnings.showwarning, "func", None) is not _show_unless_known:
        warnings.showwarning = functools.partial(_show_unless_known, warnings.showwarning)
        logging.getLogger("torch.distributed.optim.optimizer").addFilter(
            lambda record: "without TorchScript support" not in record.getMessage())


def _show_unless_known(show, message, *where, **options):
    known = "`TorchScript` support for functional optimizers is deprecated"
    if not str(message).startswith(known):
        show(message, *where, **options)
