"""Counts the updates between each forward on the parameter server and the step that belongs to it.

The training is that of `param_server/async_server.py`, with --lock that of `param_server/main.py`.
On the server, torch's hooks see every step.
"""

import argparse
import statistics

from common import report
from common.launcher import launch
from common.recorder import Recorder, current_context

from param_server import async_server
from param_server import main as lesson


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson's; rank 0 returns `staleness`, the mean of all updates, and their number."""
    program = lesson if args.lock else async_server
    server = lesson.ParameterServer if args.lock else async_server.AsyncParameterServer
    staleness, read_at = [], {}
    with Recorder() as recorder:
        @recorder.around(server, "forward")
        def forward(original, *inputs):
            if current_context() is not None:  # of a training step, not of the accuracy
                read_at[current_context()] = len(staleness)
            return original(*inputs)

        def before_step(_):
            staleness.append(len(staleness) - read_at.pop(current_context()))

        if rank == 0:
            recorder.on_step(before=before_step)
        program.run_worker(rank, world_size, args)
    if rank != 0:
        return None
    return {"staleness": statistics.fmean(staleness), "updates": len(staleness)}


if __name__ == "__main__":
    parser = lesson.build_parser("exercises/20_staleness", __doc__)
    parser.add_argument("--lock", action="store_true", help="one trainer at a time has the server")
    flags = parser.parse_args()
    report.save_metrics(flags, launch(run_worker, flags, lesson.role_name), "tensorpipe")
