"""Where a worker runs: its environment variables, its share of the cores, the network interface it speaks on."""

import contextlib
import fcntl
import functools
import logging
import os
import socket
import struct
import sys
import warnings

import torch

SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def enter(rank, world_size, local_rank, local_world_size, init_method, master_addr):
    """Bring this process into the state that every worker is in, whoever started it.

    Args:
        rank, world_size: of this process, and of all processes.
        local_rank, local_world_size: the same on this machine alone.
        init_method: where the processes meet, for `common.session`.
        master_addr: the machine of rank 0, if there are several machines.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "INIT_METHOD")
    os.environ.update(zip(names, map(str, (rank, world_size, local_rank, local_world_size, init_method)), strict=True))
    # RPC executes what it is sent: on one machine it must not listen where others can reach it. On several, gloo and
    # RPC would listen where the machine's own name points to, on many systems loopback, where nobody can reach them.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = loopback if local_world_size == world_size else interface_towards(master_addr)
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if interface is not None:
            os.environ.setdefault(name, interface)
    if "OMP_NUM_THREADS" not in os.environ:
        # Every process would take all cores otherwise: the largest single cost of RPC examples on small machines.
        torch.set_num_threads(max(1, core_count() // local_world_size))
    # init_rpc hands its own gloo Backend to a collective that would rather have a ProcessGroup: torch's business.
    warnings.filterwarnings("ignore", message=r"You are using a Backend .* as a ProcessGroup")
    # DistributedOptimizer compiles optimizers to TorchScript, which is deprecated, and says so on any filter; where it
    # does not compile one, because of its class or because this Python has no TorchScript any more, it warns of that.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    warnings.showwarning = functools.partial(_show_unless_known, warnings.showwarning)
    logging.getLogger("torch.distributed.optim.optimizer").addFilter(
        lambda record: "without TorchScript support" not in record.getMessage())


def _show_unless_known(show, message, *where, **options):
    if not str(message).startswith("`TorchScript` support for functional optimizers is deprecated"):
        show(message, *where, **options)


def core_count():
    """CPU cores this process may use: fewer than the machine has, in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def is_loopback(address):
    """Whether a master address means this very machine."""
    return address in ("localhost", "::1") or address.startswith("127.")


def interface_towards(address):
    """The network interface from which this machine reaches an IPv4 address; None if it cannot be told (not Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, 9))  # chooses the route; a datagram socket sends nothing yet
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                if fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
    return None
