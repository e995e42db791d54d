"""Addresses of machines: what is loopback, where to listen, which interface leads elsewhere."""

import contextlib
import socket

import psutil


def is_loopback(address: str) -> bool:
    """Return whether a master address means this very machine."""
    return address == "localhost" or address.startswith("127.")


def address_of(host: str) -> str:
    """Return the IPv4 address of a name, as text; raise OSError if there is none."""
    return "127.0.0.1" if is_loopback(host) else socket.gethostbyname(host)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host`, a name or address of this machine.

    Where the machine itself takes its name for loopback, as in Debian's /etc/hosts, it listens
    everywhere.

    Raises:
        OSError: if the port is taken, or `host` is another machine.
    """
    address = address_of(host)
    everywhere = is_loopback(address) and not is_loopback(host)
    return socket.create_server(("" if everywhere else address, port), backlog=1024)


def interface_towards(host: str) -> str | None:
    """Return the network interface from which this machine reaches `host`; None if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address_of(host), 9))  # chooses the route; a datagram socket sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == own for entry in addresses):
                return name
    return None
