"""A lesson in which one rank fails: `FAULT="1 SIGKILL" python tests/fault.py rpc_rl.main FLAGS`.

The rank fails at its fifth step of an environment, of an optimizer, or through a linear layer. Every
process executes this file (also those that are forked or spawned), so the patch is in all of them.
"""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: F401, E402  hears Ctrl-C while torch is imported

import gymnasium.envs.classic_control.cartpole as cartpole  # noqa: E402
import torch  # noqa: E402

calls = 0


def fail():
    """Fail at the fifth call, in the rank that FAULT names."""
    global calls
    rank, fault = os.environ["FAULT"].split()
    calls += os.environ.get("RANK") == rank
    if calls != 5:
        return
    calls += 1
    if fault == "raise":
        raise ValueError("injected")
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "sleeps":  # the rank still beats
        time.sleep(1000)
    else:  # "exit0", "exit3"
        os._exit(int(fault[-1]))


def patch(owner, name):
    """Fail before a method."""
    original = getattr(owner, name)

    def method(*args, **kwargs):
        fail()
        return original(*args, **kwargs)

    setattr(owner, name, method)


patch(torch.optim.SGD, "step")
patch(torch.nn.Linear, "forward")
patch(cartpole.CartPoleEnv, "step")

if __name__ == "__main__":
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
