"""Counts the bytes that rank 0 sends in each ring of `p2p_collectives/ring_allreduce.py`."""

from unittest import mock

from common import report
from common.launcher import launch

from p2p_collectives import ring_allreduce as lesson
from p2p_collectives.messages import recorded


def run_worker(rank, world_size, args):
    """The lesson's, with its messages counted; rank 0 returns `sent`, bytes of one all-reduce."""
    sent, honest = {}, lesson.algorithms

    def counted(name, all_reduce, messages):
        def counting(tensor):
            first = len(messages.sent)
            all_reduce(tensor)
            sent[name] = sum(n_bytes for _, n_bytes in messages.sent[first:])

        return counting

    with recorded() as messages, mock.patch.object(lesson, "algorithms", lambda dtype: {
            name: counted(name, ring, messages) for name, ring in honest(dtype).items()}):
        metrics = lesson.run_worker(rank, world_size, args)
    return metrics and {"sent": sent}


if __name__ == "__main__":
    flags = lesson.build_parser().parse_args()
    flags.example = "exercises/05_ring_bytes"
    report.save_metrics(flags, launch(run_worker, flags, lesson.role_name), "gloo")
