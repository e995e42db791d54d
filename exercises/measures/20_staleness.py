"""Counts the updates between each forward on the parameter server and the step that belongs to it.

The training is that of `param_server/async_server.py`, with --lock that of `param_server/main.py`.
On the server, torch's hooks see every step.
"""

import statistics

from common import report
from common.launcher import launch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from param_server import async_server
from param_server import main as lesson
from param_server.recording import current_context


def run_worker(rank, world_size, args):
    """The lesson's; rank 0 returns `staleness`, the mean of all updates, and their number."""
    staleness, read_at, make_server = [], {}, lesson.ParameterServer.__init__

    def init(server, args):
        make_server(server, args)
        honest_forward = server.forward

        def forward(*inputs):
            if current_context() is not None:  # of a training step, not of the accuracy
                read_at[current_context()] = len(staleness)
            return honest_forward(*inputs)

        server.forward = forward

    def before_step(*_):
        staleness.append(len(staleness) - read_at.pop(current_context()))

    if rank == 0:
        lesson.ParameterServer.__init__ = init
        register_optimizer_step_pre_hook(before_step)
    program = lesson if args.lock else async_server
    program.run_worker(rank, world_size, args)
    if rank != 0:
        return None
    return {"staleness": statistics.fmean(staleness), "updates": len(staleness)}


if __name__ == "__main__":
    parser = lesson.build_parser("exercises/20_staleness", __doc__)
    parser.add_argument("--lock", action="store_true", help="one trainer at a time has the server")
    flags = parser.parse_args()
    report.save_metrics(flags, launch(run_worker, flags, lesson.role_name), "tensorpipe")
