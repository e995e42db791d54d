"""A program whose ranks tell the state in which they were started."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli, launch  # noqa: E402
from common.program import role_name  # noqa: E402

import torch  # noqa: E402

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def tell_state(rank, world_size, args):
    if rank == 0:
        return None
    return {"ranks": [os.environ[name] for name in PLACE], "threads": torch.get_num_threads(),
            "interfaces": [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")],
            "variable": os.environ.get("A_VARIABLE"), "folder": os.getcwd()}


def print_state(rank, world_size, args):
    print(f"threads {torch.get_num_threads()}, transports {os.environ.get('RPC_TRANSPORTS')}", flush=True)


if __name__ == "__main__":
    launch.launch(print_state, cli.Parser("test", "", 1).parse_args(), role_name)
