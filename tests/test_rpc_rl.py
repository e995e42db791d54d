"""Tutorial 6_5, first half: what `--check` cannot see."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
import time

import psutil
import torch

from rpc_rl import fast
from rpc_rl import main as rpc_rl
from tests.helpers import args_of, commands_in, nothing_left, processes, running, script

COMMAND = script(*commands_in("README.md")[0][1:])


def test_defaults_can_solve(tmp_path):
    """The tutorial's cannot: 100 steps shared by the observers, and a threshold of 475."""
    args = args_of(rpc_rl, tmp_path)
    assert args.total_steps_per_episode // (args.world_size - 1) >= args.reward_threshold == 475


def test_the_last_episodes_are_saved(tmp_path):
    """Their number is no multiple of --log_interval; a resumed run continues after the last one."""
    saved, flags = tmp_path / "run.pt", ["--log_interval", "3", "--output_dir", str(tmp_path)]
    fast.main([*flags, "--max_episodes", "4", "--checkpoint", str(saved)])
    assert torch.load(saved, weights_only=True)["history"]["episodes"] == 4
    resumed = fast.main([*flags, "--max_episodes", "5", "--checkpoint", str(saved), "--resume"])
    assert resumed["rewards"] == fast.main([*flags, "--max_episodes", "5"])["rewards"]


def test_on_a_terminal(tmp_path):
    """A bar of the running reward replaces the lines."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    shown = b""
    with running([*COMMAND, "--max_episodes", "5", "--log_interval", "1"], tmp_path, stdout=terminal, stderr=terminal):
        os.close(terminal)
        with contextlib.suppress(OSError):  # how a terminal says that nothing writes to it any more
            while chunk := os.read(screen, 4096):
                shown += chunk
    os.close(screen)
    assert b"/475 |" in shown
    assert b"[agent]" not in shown
    assert b"not solved in 5 episodes" in shown.splitlines()[-2]


def test_it_learns_and_is_only_on_loopback(tmp_path):
    """Until it balances for 30; no other machine can reach it."""
    flags, addresses = ["--lr", "0.01", "--reward_threshold", "30", "--max_episodes", "300", "--output_dir", "out"], set()
    with running([*COMMAND, *flags], tmp_path) as run:
        while run.poll() is None:  # from its beginning to its end, whenever that is on a busy machine
            for process in processes(lambda process: os.getsid(process.pid) == run.pid):  # launcher, fork server, ranks
                with contextlib.suppress(psutil.Error):
                    addresses |= {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
            time.sleep(1.0)
        out, err = run.communicate(timeout=60)
        nothing_left(run, tmp_path)
    assert (run.returncode, err) == (0, "")  # and no warning
    assert addresses  # gloo and RPC do listen,
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert "[agent] episode 10  last reward " in out
    assert json.loads((tmp_path / "out/metrics.json").read_text())["running_reward"] > 30  # without learning, about 15
