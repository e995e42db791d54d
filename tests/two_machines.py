"""Two machines made of one: network namespaces, with a cable between them.

    with two_machines() as machines:                      two network cards, back to back
    with two_machines(round_trip_s=0.002) as machines:    a question and its answer: 2 ms longer

    subprocess.run(machines[1].command("python", "rpc_rnn/main.py", ...))

Linux, as root, with `ip` (Debian's iproute2). They share the disk and the cores.

The long cable is a pair of TUN devices (https://docs.kernel.org/networking/tuntap.html). What one
machine sends, this process reads; half a round trip later, the other machine receives it. It can
carry as much as a Python process can. (Where the kernel has netem, `tc` delays without a process.)
"""

import collections
import contextlib
import fcntl
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from typing import NamedTuple

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # of linux/if_tun.h
MTU = 60_000  # bytes of a packet: few and large ones are less work for this process
_numbers = itertools.count()  # of the pairs that this process has made


class Machine(NamedTuple):
    """One of them."""

    name: str  # of its network namespace; its only network card is eth0
    address: str

    def command(self, *words):
        """The words that run a command there."""
        return ["ip", "netns", "exec", self.name, *map(str, words)]


def ip(*words):
    """Run `ip`.

    Raises:
        subprocess.CalledProcessError: with what it says in `stderr`.
    """
    return subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


def why_not(round_trip_s=None):
    """Why there can be no two machines here, with such a cable, or None."""
    if shutil.which("ip") is None:
        return "needs `ip` (Debian's iproute2) to make two network namespaces"
    if os.geteuid() != 0:
        return "needs root to make two network namespaces"
    try:
        with two_machines(round_trip_s):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here ({error.stderr.strip()})"
    except OSError as error:
        return f"a long cable cannot be made here ({error})"


class Weather:
    """What a long cable does to packets; it may change while they are under way.

    Attributes:
        lost: the share of packets that get lost, from the first machine and from the second one.
        held_until: packets arrive no earlier (`time.monotonic`): a delay spike.
    """

    def __init__(self):
        self.lost, self.held_until, self.chance = [0.0, 0.0], 0.0, random.Random(0)


@contextlib.contextmanager
def two_machines(round_trip_s=None, weather=None):
    """Yield two `Machine`s, which reach each other and nobody else.

    Args:
        round_trip_s: what the cable adds to a question and its answer; None: no long cable.
        weather: `Weather` of a long cable; None: always fair.
    """
    run = f"{os.getpid()}-{next(_numbers)}"
    machines = [Machine(f"machine{n}-{run}", f"10.123.45.{n}") for n in (1, 2)]
    one, other = (machine.name for machine in machines)
    with contextlib.ExitStack() as stack:
        for machine in machines:
            ip("netns", "add", machine.name)
            stack.callback(ip, "netns", "delete", machine.name)
        if round_trip_s is None:
            ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0",
               "netns", other)
        else:
            ends = [stack.enter_context(network_card(name)) for name in (one, other)]
        for machine in machines:
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for card in ("lo", "eth0"):
                ip("-n", machine.name, "link", "set", card, "up")
        for machine in machines:
            # The kernel takes up to a second. Until then libuv, and so RPC, sees no card.
            up = ("-n", machine.name, "link", "show", "eth0", "up")
            deadline = time.monotonic() + 10
            while round_trip_s is None and "state UP" not in ip(*up).stdout:
                if time.monotonic() > deadline:
                    raise OSError("the network card of a namespace does not come up")
                time.sleep(0.01)
        if round_trip_s is not None:
            stack.enter_context(long_cable(ends, round_trip_s / 2, weather))  # which writes to both
        yield machines


@contextlib.contextmanager
def network_card(namespace):
    """Make a TUN device the `eth0` of a namespace; yield the end of it that this process has."""
    name = f"tun{os.getpid()}"
    end = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        ip("link", "set", name, "mtu", MTU, "netns", namespace, "name", "eth0")
        yield end
    finally:
        os.close(end)


@contextlib.contextmanager
def long_cable(ends, delay_s, weather=None):
    """Carry packets between two devices for as long as the context lasts."""
    hears, says = os.pipe()
    cable = threading.Thread(target=carry, args=(*ends, delay_s, hears, weather or Weather()))
    cable.start()
    try:
        yield
    finally:
        os.close(says)
        cable.join()
        os.close(hears)


def carry(one, other, delay_s, stop, weather):
    """Write each packet that comes out of one device into the other one, `delay_s` later.

    Unless the weather keeps it.

    Returns when the file descriptor `stop` can be read.
    """
    # Both lines are for this thread alone. It waits for no core, if it may, and leaves all but the
    # first one to others.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    to = {one: other, other: one}
    under_way = collections.deque()  # (when it arrives, where, packet): all take the same time
    while True:
        until_next = max(0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([one, other, stop], [], [], until_next)
        if stop in readable:
            return
        arrival = max(time.monotonic() + delay_s, weather.held_until)
        for end in readable:
            packet = os.read(end, MTU)
            if weather.chance.random() >= weather.lost[end == other]:
                under_way.append((arrival, to[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            os.write(end, packet)
