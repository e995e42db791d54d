"""Prepare each rank: its meeting point, its share of the cores, its output."""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from common import ROOT
from common.limits import refuse

import joblib
import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, rpc
from torch.distributed.rendezvous import register_rendezvous_handler

SCHEME = "launcher"  # of INIT_METHOD: the ranks meet in the launcher's store
LIMIT = timedelta(seconds=60)  # for a single call of a store
# Bytes. The name of a Unix socket has at most 107, and 32 follow the folder.
LONGEST_TEMPDIR = 70
# The fork server imports these; the third one is needed for the first optimizer.
PRELOAD = ["torch.distributed.rpc", "torch.distributed.optim", "torch._dynamo", "common.launch"]


# --- the store in which the ranks meet


def serve(host: str, port: int) -> tuple[dist.TCPStore, str]:
    """Serve the store of a run on `host`, which is this machine; return it and its address.

    Args:
        host: The interface to listen on: RPC and the store execute what they are sent, so on one
            machine nothing listens where other machines can reach it.
        port: 0 for any free port.

    Raises:
        SystemExit: 2 after one line, if that is not possible.
    """
    address = address_of(host)
    # A machine may take its own name for loopback, as Debian does; other machines cannot.
    everywhere = is_loopback(address) and not is_loopback(host)
    try:
        listener = socket.create_server(("" if everywhere else address, port), backlog=1024)
        own_port = listener.getsockname()[1]
        socket.create_connection((address, own_port), timeout=5).close()
    except OSError as error:
        reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        if port:
            refuse(f"--master_port {port} cannot be opened on {host} ({reason}); "
                   "give another port to all ranks")
        refuse(f"this machine cannot connect to itself at {address} ({reason}); "
               "is its loopback interface up?")
    store = dist.TCPStore(address, own_port, None, True, LIMIT, wait_for_workers=False,
                          master_listen_fd=listener.detach())
    return store, f"{address}:{own_port}"


def connect(address: str, deadline: float = 0.0) -> dist.TCPStore:
    """Connect to the store at "HOST:PORT"; keep trying until `deadline`, of `time.monotonic`.

    Raises:
        OSError, RuntimeError: No store is served there.
    """
    host, _, port = address.rpartition(":")
    while True:
        try:  # torch would print errors of its own for a port that is not open yet
            socket.create_connection((host, int(port)), timeout=LIMIT.total_seconds()).close()
            # With a longer timeout, torch would keep trying after the server has gone.
            store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=5),
                                  wait_for_workers=False)
            store.set_timeout(LIMIT)
            return store
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def meet(url: str, timeout: timedelta = LIMIT, **_: object) -> Iterator[tuple]:
    """Connect a process group or RPC to the store of the run: a handler of torch's rendezvous."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    store = connect(parts.netloc)
    store.set_timeout(timeout)
    yield store, int(query["rank"][0]), int(query["world_size"][0])


register_rendezvous_handler(SCHEME, meet)


def is_loopback(address: str) -> bool:
    """Return whether a master address means this very machine."""
    return address == "localhost" or address.startswith("127.")


def address_of(host: str) -> str:
    """Return the IPv4 address of a name, as text; raise OSError if there is none."""
    return "127.0.0.1" if is_loopback(host) else socket.gethostbyname(host)


def interface_towards(host: str) -> str | None:
    """Return the network interface from which this machine reaches `host`; None if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address_of(host), 9))  # chooses the route; a datagram socket sends nothing
        own = probe.getsockname()[0]
        return next((name for name, addresses in psutil.net_if_addrs().items()
                     if own in [entry.address for entry in addresses]), None)
    return None


# --- before the processes start


def prepare_start(run_worker: Callable) -> None:
    """Set the imports of the fork server, which all ranks share, and the folder of its socket."""
    modules, file = [*PRELOAD], getattr(sys.modules[run_worker.__module__], "__file__", None)
    program = Path(file or "").resolve()
    if program.parent.parent == ROOT:
        modules.append(f"{program.parent.name}.{program.stem}")
    multiprocessing.set_forkserver_preload([*modules, "common.fork_server"])
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # pdb has removed it
    # It imports from this checkout, not from the current folder.
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
              if path not in ("", str(ROOT))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *others])
    os.environ["PYTHONSAFEPATH"] = "1"
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPDIR:
        tempfile.tempdir = "/tmp"  # multiprocessing creates its socket folder there
    with contextlib.suppress(ImportError, AttributeError):
        # Now, because multiprocessing would start it in a thread that blocks signals, and unblock
        # them. (Not documented. Without it, an early Ctrl-C shows tracebacks.)
        from multiprocessing import resource_tracker
        resource_tracker.ensure_running()


def share_socket_folder() -> None:
    """Create one folder for the sockets of ranks and their children; this process removes it."""
    with contextlib.suppress(ImportError, AttributeError):
        # (Not documented. Without it, a DataLoader's worker that is killed leaves a folder.)
        from multiprocessing import util
        util.get_temp_dir()


def raise_open_files() -> None:
    """Raise the limit of open files as far as the user may: RPC needs more than the usual 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says that there is none, and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def of_launcher() -> tuple[dict, list[Connection]]:
    """Return what a rank inherits: environment and output; the fork server may have others."""
    return dict(os.environ), [Connection(os.dup(number), readable=False) for number in (1, 2)]


def inherit(environ: dict, streams: Sequence[Connection]) -> None:
    """Take over the environment and output that `of_launcher` returned."""
    os.environ.clear()
    os.environ.update(environ)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    begin()


def begin() -> None:
    """Set name resolution and crash reports, which a rank needs from its first moment."""
    # Wait for 1 s, not 5, for a name server that does not answer: torch asks for the name of each
    # address that it connects to, for its log. glibc reads this when it is asked first.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    # If C++ crashes or aborts, print the lines in which this thread was; on SIGUSR1, the lines in
    # which all threads are.
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=2)


# --- in a rank


def enter(args: Namespace, rank: int, local_rank: int, local_world_size: int,
          init_method: str) -> None:
    """Bring this process into the state of every rank, in all launch modes.

    Args:
        args: Parsed flags.
        rank: Rank of this process.
        local_rank, local_world_size: Its rank and the number of ranks on this machine.
        init_method: Address of the meeting point, for `common.session`.
    """
    under_torchrun = init_method == "env://"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "INIT_METHOD")
    values = (rank, args.world_size, local_rank, local_world_size, init_method)
    os.environ.update(zip(names, map(str, values), strict=True))
    if not under_torchrun:
        parts = urlsplit(init_method)
        os.environ.update(MASTER_ADDR=parts.hostname, MASTER_PORT=str(parts.port))
    # RPC executes what it is sent: on one machine it must not listen where other machines can reach
    # it. On several machines, gloo and RPC would listen where the machine's own name points to,
    # which is loopback on many systems.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = (loopback if local_world_size == args.world_size
                 else interface_towards(os.environ["MASTER_ADDR"]))
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if interface is not None:
            os.environ.setdefault(name, interface)
    cores = joblib.cpu_count()  # not all of them in a container
    if local_world_size > cores and (under_torchrun or args.rank is not None):
        # Shared memory (shm) is RPC's fastest transport, but a thread polls it. Between polls it
        # lets the processes of its session run; these ranks have several sessions. Polling then
        # takes the time of the ranks that compute (Linux, sched_autogroup): ddp_rpc_hybrid became
        # up to twice as slow. TCP (uv) does not poll.
        os.environ.setdefault("RPC_TRANSPORTS", "uv")
    # Otherwise each process would take all cores: the largest single cost of RPC examples on small
    # machines.
    torch.set_num_threads(users_threads() or max(1, cores // local_world_size))
    # Of groups that are made without a timeout: those of a DeviceMesh and of new_group. (If these
    # names go, such groups wait for half an hour.)
    distributed_c10d.default_pg_timeout = timedelta(seconds=args.timeout)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=args.timeout)
    quiet()
    reproducible(args)


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
    if dist.is_torchelastic_launched() and setting == "1":
        # What torchrun itself was started with; not on every system.
        with contextlib.suppress(psutil.Error):
            if "OMP_NUM_THREADS" not in psutil.Process(os.getppid()).environ():
                return None
    return int(setting)


def quiet() -> None:
    """Keep a normal run of these examples free of torch's warnings, and of nothing else."""
    # init_rpc hands its own gloo Backend to a collective that expects a ProcessGroup.
    warnings.filterwarnings("ignore", message=r"You are using a Backend .* as a ProcessGroup")
    # DistributedOptimizer compiles optimizers to TorchScript, which is deprecated. If it does not
    # compile one, because of its class or its Python, it warns of that.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated",
                            category=DeprecationWarning)
    logging.getLogger("torch.distributed.optim.optimizer").addFilter(
        lambda record: not record.getMessage().startswith("Creating the optimizer"))
    show = warnings.showwarning

    def show_unless_known(message, *where, **options):  # torch says this one on any filter
        if not str(message).startswith("`TorchScript` support for functional optimizers is"):
            show(message, *where, **options)

    warnings.showwarning = show_unless_known
    # RPC prints every exception where it was raised, also those that only follow from another one.
    # The launcher prints the one that counts. (If this private name goes, it is printed twice.)
    with contextlib.suppress(AttributeError):
        rpc.internal.print = lambda *_, **__: None


# --- after a rank


def remove_half_written(args: Namespace, pids: Sequence[int]) -> None:
    """Remove what these processes were writing when they were killed.

    `report.replacing` puts the id of its process into the name.
    """
    checkpoint, writers = getattr(args, "checkpoint", None), {str(pid) for pid in pids}
    for folder in {args.output_dir, checkpoint.parent if checkpoint else args.output_dir}:
        for path in folder.glob(".*.*.tmp"):
            if path.name.split(".")[-2] in writers:
                path.unlink(missing_ok=True)
