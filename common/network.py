"""Addresses of machines: what is loopback, where to listen, which interface leads elsewhere."""

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def is_loopback(address):
    """Whether a master address means this very machine."""
    return address == "localhost" or address.startswith("127.")


def address_of(host):
    """The IPv4 address of a name, as text. OSError if there is none."""
    return "127.0.0.1" if is_loopback(host) else socket.gethostbyname(host)


def own_address(host):
    """The IPv4 address under which `host`, another machine or this one, sees this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address_of(host), 9))  # chooses the route; a datagram socket sends nothing
        return probe.getsockname()[0]


def listen(host, port):
    """A socket that listens on this machine's address `host`, as others call it.

    Where the machine itself takes its name for loopback, as Debian's /etc/hosts says, it listens
    everywhere.

    Raises:
        OSError: if the port is taken.
    """
    own = own_address(host)
    everywhere = is_loopback(own) and not is_loopback(host)
    return socket.create_server(("" if everywhere else own, port), backlog=1024)


def interface_towards(address):
    """The network interface from which this machine reaches an IPv4 address; None if unknown."""
    with contextlib.suppress(OSError):
        own = socket.inet_aton(own_address(address))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an address
                    request = struct.pack("256s", name.encode())
                    if fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24] == own:
                        return name
    return None  # not on Linux, or no such address
