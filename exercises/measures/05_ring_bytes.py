"""Counts the bytes that rank 0 sends in each ring of `p2p_collectives/ring_allreduce.py`."""

import argparse

from common import report
from common.launcher import launch
from common.recorder import Recorder

from p2p_collectives import ring_allreduce as lesson
from p2p_collectives.messages import record_messages


def run_worker(rank: int, world_size: int, args: argparse.Namespace) -> dict | None:
    """Run the lesson's; rank 0 returns `sent`, by ring: the bytes of one all-reduce."""
    sent = {}
    with Recorder() as recorder:
        messages = record_messages(recorder)

        @recorder.around(lesson, "algorithms")
        def algorithms(original):
            return {name: counted(name, ring) for name, ring in original().items()}

        def counted(name, all_reduce):
            def counting(tensor):
                first = len(messages.sent)
                all_reduce(tensor)
                sent[name] = sum(n_bytes for _, n_bytes in messages.sent[first:])

            return counting

        metrics = lesson.run_worker(rank, world_size, args)
    return metrics and {"sent": sent}


if __name__ == "__main__":
    flags = lesson.build_parser().parse_args()
    flags.example = "exercises/05_ring_bytes"
    report.save_metrics(flags, launch(run_worker, flags, lesson.role_name), "gloo")
