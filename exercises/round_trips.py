"""Count the RPC round trips of each training step of rpc_rnn/main.py, for exercise 12.

    python exercises/round_trips.py --nlayers 3 --epochs 1 --batch_size 2000

The flags are those of rpc_rnn/main.py. It writes `round_trips`, a list with a number for each step,
to metrics.json. Every number comes from what a step has left in its context of distributed autograd
and from the optimizers that it has called.
"""

import json
from argparse import Namespace

from common.launch import launch
from common.recorder import Recorder

from torch.distributed import autograd as dist_autograd
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn import main as lesson


def count(rank: int, world_size: int, args: Namespace) -> dict | None:
    """Train as the lesson does; the trainer returns the round trips of its steps."""
    counted, updates = [], []

    def end_of_step(context_id, _):
        context = dist_autograd._retrieve_context(context_id)
        sent, received = len(context._send_functions()), len(context._recv_functions())
        forward = received  # each answer holds a tensor with its graph
        backward = sent + received  # the gradient of each tensor travels the other way
        release = len({*context._known_worker_ids()} - {rank})
        counted.append(forward + backward + updates.pop() + release)

    with Recorder() as recorder:
        @recorder.around(DistributedOptimizer, "step")
        def step(original, opt, context_id):
            updates.append(sum(not optimizer.is_owner() for optimizer in opt.remote_optimizers))
            original(opt, context_id)

        recorder.on_context(after=end_of_step)
        lesson.run_worker(rank, world_size, args)
    return {"round_trips": counted} if rank == 1 else None


if __name__ == "__main__":
    args = lesson.build_parser().parse_args()
    metrics = launch(count, args, lesson.role_name)
    args.output_dir.joinpath("metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
