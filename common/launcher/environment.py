"""The state that every worker is in: environment variables, its share of the cores, quiet."""

import contextlib
import ctypes
import faulthandler
import functools
import logging
import os
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import psutil
import torch
from common.launcher.network import interface_towards
from torch.distributed import distributed_c10d, rpc

# Environment variables for the fork server: what script it should import, and who has started it.
MAIN_PATH = "DISTRIBUTED_TUTORIALS_MAIN"
LAUNCHER = "DISTRIBUTED_TUTORIALS_LAUNCHER"
ERROR = 2  # of TORCH_CPP_LOG_LEVEL
PR_SET_PDEATHSIG = 1  # of prctl.h


def begin() -> None:
    """Do what a worker needs from its first moment on, whoever started it."""
    # Wait for 1 s, not 5, for a name server that does not answer. torch asks for the name of each
    # address that it connects to, for its log. It takes 127.0.0.1 for an IPv6 address, which
    # /etc/hosts does not have: where the network is away, or loses packets, a rank would start 5 to
    # 30 s late. glibc reads this when a thread asks for the first time.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    wake_with_parent()  # not torch's SIGINT: the heartbeat cleans up before it ends
    # Where C++ crashes or aborts, print the lines in which this thread was.
    faulthandler.enable(file=2, all_threads=False)
    quiet_cpp()


def enter(args: Namespace, rank: int, local_rank: int, local_world_size: int, init_method: str,
          cores: int) -> None:
    """Bring this process into the state that every worker is in, whoever started it.

    Args:
        args: the parsed flags.
        rank: of this process.
        local_rank, local_world_size: its rank, and how many there are, on this machine alone.
        init_method: where the processes meet, for `common.session`.
        cores: how many this machine has for them (joblib's `cpu_count`: not all in a container).
    """
    under_torchrun = init_method == "env://"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "INIT_METHOD")
    values = (rank, args.world_size, local_rank, local_world_size, init_method)
    os.environ.update(zip(names, map(str, values), strict=True))
    if not under_torchrun:
        # The first tells torch that a launcher serves the store at that address, no rank. (It is
        # not documented. Without it, rank 0 would serve one, too, at a port that is taken.)
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR=host, MASTER_PORT=port)
    # RPC executes what it is sent: on one machine it must not listen where others can reach it. On
    # several, gloo and RPC would listen where the machine's own name points to, on many systems
    # loopback, where nobody can reach them.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = (loopback if local_world_size == args.world_size
                 else interface_towards(os.environ["MASTER_ADDR"]))
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if interface is not None:
            os.environ.setdefault(name, interface)
    together = args.rank is None and not under_torchrun  # one command has started all ranks
    if transports := rpc_transports(local_world_size, cores, together):
        os.environ.setdefault("RPC_TRANSPORTS", transports)
    # Every process would take all cores otherwise: the largest single cost of RPC examples on small
    # machines.
    torch.set_num_threads(users_threads() or max(1, cores // local_world_size))
    # Of groups made without a time-out: those of a DeviceMesh, which takes none, and new_group's.
    # (Under other names, these would have no effect: such groups would wait for half an hour.)
    distributed_c10d.default_pg_timeout = timedelta(seconds=args.timeout)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=args.timeout)
    quiet()
    reproducible(args)
    # RPC prints every exception where it was raised, also those that only follow from another one.
    # The launcher prints the one that counts, which has come back to the caller. (Without this
    # private name, it would be printed twice.)
    rpc.internal.print = lambda *_, **__: None


def rpc_transports(local_world_size: int, cores: int, together: bool) -> str | None:
    """Return TensorPipe's ways to send, for RPC_TRANSPORTS, or None for all.

    Shared memory (shm) is the fastest, but a thread polls it all the time. Between polls it lets
    the others of its session run. Processes that one command has started share a session. Under
    torchrun and in terminals of their own they do not, and where they outnumber the cores, polling
    would take the time of those that have work to do (Linux, sched_autogroup): ddp_rpc_hybrid
    became up to twice as slow. There it is TCP alone (uv).
    """
    return "uv" if local_world_size > cores and not together else None


def reproducible(args: Namespace) -> None:
    """Compute float32 as float32 on a GPU, and always alike: for `--check` and exact resumes."""
    if args.check or getattr(args, "checkpoint", None):
        # True by default: convolutions and LSTMs with 10 bits.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


def users_threads() -> int | None:
    """Return OMP_NUM_THREADS if the user has set it, else None: torchrun by itself sets it to 1."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if not setting.isdecimal() or int(setting) == 0:
        return None
    if torch.distributed.is_torchelastic_launched() and setting == "1":
        # What torchrun itself was started with; not on every system.
        with contextlib.suppress(psutil.Error):
            if "OMP_NUM_THREADS" not in psutil.Process(os.getppid()).environ():
                return None
    return int(setting)


def quiet() -> None:
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
            lambda record: not record.getMessage().startswith("Creating the optimizer"))
    quiet_cpp()


def _show_unless_known(show: Callable, message: object, *where, **options) -> None:
    known = "`TorchScript` support for functional optimizers is deprecated"
    if not str(message).startswith(known):
        show(message, *where, **options)


def wake_with_parent() -> None:
    """Let the system wake this process, if it is frozen, when its parent ends: it then ends, too.

    On Linux. (Without multiprocessing's private names below, a frozen fork server would stay
    when its launcher is killed.)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    # The fork server gives this to each of its children, and ends only when nobody has it any more.
    if descriptor := getattr(forkserver._forkserver, "_forkserver_alive_fd", None):
        os.close(descriptor)
        forkserver._forkserver._forkserver_alive_fd = None


@functools.cache  # what is forked inherits both
def quiet_cpp() -> None:
    """Let torch's C++ print errors, and no warnings: who survives would warn of each lost peer.

    The same as TORCH_CPP_LOG_LEVEL=ERROR, which has its effect only before torch is imported. That
    the number has a name that can be found is not promised; without it, there are warnings.
    """
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    for library in Path(torch.__file__).parent.glob("lib/libc10.*"):
        with contextlib.suppress(OSError, ValueError):
            ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level").value = ERROR
