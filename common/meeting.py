"""How the launchers of several terminals and machines find each other.

The launcher of rank 0 listens, and puts its port and a token into torch's TCPStore; the others read
them there, and connect to it. It serves this store itself; under torchrun there is one already.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from common import network
from common.limits import refuse
from common.peers import WELCOME, Peers

IMPORT_S = 8.0  # a tight --timeout is not for the seconds in which another terminal imports torch


def meet_manually(args):
    """Find the launchers in the other terminals.

    The launcher of rank 0 serves the store and stays until all others have left, so no rank has to
    wait for another one's shutdown.

    Returns:
        The init method of the ranks, the store, the `Peers`.

    Raises:
        SystemExit: after one line; 2 if rank 0's port cannot be opened, 1 if rank 0 does not answer
            within `--timeout` and a few seconds.
    """
    host, port, rank = network.address_of(args.master_addr), args.master_port, args.rank
    limit_s, listener = args.timeout + IMPORT_S, None
    if rank == 0:
        try:
            listener = network.listen(host, port)
        except OSError as error:
            refuse(f"--master_port {port} cannot be opened on {args.master_addr} "
                   f"({os.strerror(error.errno).lower()}); give another port to all ranks")

    def connect():
        if rank != 0:
            _wait_for_port(host, port, limit_s)
        served = {"master_listen_fd": listener.detach()} if rank == 0 else {}
        store = dist.TCPStore(host, port, None, rank == 0, timedelta(seconds=limit_s),
                              wait_for_workers=False, **served)
        return store, _peers(store, rank, args.world_size, host, limit_s, "watch")

    met = _within(limit_s, connect)
    if met is None:
        print(f"error: rank 0 cannot be reached: {args.master_addr}:{port} has not answered for "
              f"{limit_s:g} s", file=sys.stderr, flush=True)
        raise SystemExit(1)
    return f"tcp://{host}:{port}", *met


def meet_under_torchrun(rank, world_size, one_machine, limit_s, launches):
    """Find those beside the other ranks through torchrun's own store.

    Args:
        rank, world_size: of this process, and of all.
        one_machine: whether all ranks are here.
        limit_s: seconds within which all must have come.
        launches: how many launches there have been in this process.

    Returns:
        The store, which must live as long as the run, and the `Peers`.
    """
    host = "127.0.0.1" if one_machine else os.environ["MASTER_ADDR"]
    limit = timedelta(seconds=limit_s)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
    # torchrun's store outlives the ranks that it starts anew; several machines count their attempts
    # apart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else ""
    return store, _peers(store, rank, world_size, host, limit_s, f"watch {attempt} {launches}")


def _within(seconds, function):
    """What `function()` returns; None if it fails, or takes longer.

    In a thread: where a port accepts and never answers, torch would wait for ever.
    """
    returned = []

    def attempt():
        with suppress(RuntimeError, OSError, ValueError):
            returned.append(function())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.05)
    return returned[0] if returned else None


def _wait_for_port(host, port, seconds):
    """Wait until somebody listens; torch, which could wait itself, would print its own errors."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=seconds):
            return
        time.sleep(0.1)
    raise ConnectionError(f"nobody listens at {host}:{port}")


def _peers(store, rank, world_size, host, limit_s, key):
    """Connect this launcher with that of rank 0, whose address is in the store under `key`.

    Raises:
        RuntimeError, OSError: if that does not succeed within `limit_s` seconds.
    """
    if rank == 0:
        listener, token = network.listen(host, 0), secrets.token_hex(8)
        store.set(key, json.dumps([listener.getsockname()[1], token]))
        return Peers(rank, world_size, token, limit_s, listener)
    deadline = time.monotonic() + limit_s
    while True:
        port, token = json.loads(store.get(key))
        try:
            left_s = max(0.1, deadline - time.monotonic())
            sock = socket.create_connection((host, port), timeout=left_s)
            sock.sendall(json.dumps({"hello": rank, "token": token}).encode() + b"\n")
            if sock.recv(len(WELCOME)):
                return Peers(rank, world_size, token, limit_s, sock)
        except OSError:
            pass  # the address of an earlier attempt, whose processes are just ending
        if time.monotonic() > deadline:
            raise ConnectionError(f"no launcher of rank 0 at {host}:{port}")
        time.sleep(0.1)
