"""Counts the updates between each forward on the parameter server and the step that belongs to it.

The training is that of `param_server/main.py`. On the server, torch's hooks see every step.
"""

import statistics

from common import report
from common.launcher import launch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from param_server import main as lesson
from param_server.recording import current_context


def run_worker(rank, world_size, args):
    """The lesson's; rank 0 returns `staleness`, the mean of all updates, and their number."""
    staleness, read_at = [], {}
    if rank == 0:
        server = lesson.get_parameter_server(args)
        honest_forward = server.forward

        def forward(*inputs):
            if current_context() is not None:  # of a training step, not of the accuracy
                read_at[current_context()] = len(staleness)
            return honest_forward(*inputs)

        def before_step(*_):
            staleness.append(len(staleness) - read_at.pop(current_context()))

        server.forward = forward
        register_optimizer_step_pre_hook(before_step)
    lesson.run_worker(rank, world_size, args)
    if rank != 0:
        return None
    return {"staleness": statistics.fmean(staleness), "updates": len(staleness)}


if __name__ == "__main__":
    flags = lesson.build_parser().parse_args()
    flags.example = "exercises/20_staleness"
    report.save_metrics(flags, launch(run_worker, flags, lesson.role_name), "tensorpipe")
