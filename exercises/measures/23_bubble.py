"""Measures for how long the stages of a pipeline wait: threads that sleep where they would compute.

`model_parallel_resnet/main.py` has two stages; here there can be more, on any number of cores.
"""

import argparse
import itertools
import queue
import threading
import time

from common import report
from common.cli import Parser, bounded

STAGE_S = 0.6  # that each stage computes, for a whole batch


def idle_share(num_split: int, stages: int) -> float:
    """Return the share of the time of a batch in which a stage has nothing to do."""
    between = [queue.Queue() for _ in range(stages + 1)]

    def compute(taken_from, passed_to):
        for _ in range(num_split):
            micro_batch = taken_from.get()
            time.sleep(STAGE_S / num_split)
            passed_to.put(micro_batch)

    threads = [threading.Thread(target=compute, args=queues)
               for queues in itertools.pairwise(between)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for i in range(num_split):
        between[0].put(i)
    for thread in threads:
        thread.join()
    return 1 - STAGE_S / (time.perf_counter() - began)


def main(args: argparse.Namespace) -> None:
    """Measure with each number of micro-batches."""
    shares = [idle_share(num_split, args.stages) for num_split in args.num_splits]
    report.save_metrics(args, {"idle_share": shares}, backend=None)


if __name__ == "__main__":
    parser = Parser("exercises/23_bubble", __doc__, distributed=False)
    count = bounded(int, at_least=1)
    parser.add_argument("--stages", type=count, default=4, metavar="N", help="threads")
    parser.add_argument("--num_splits", type=count, nargs="+", default=[2, 8], metavar="M",
                        help="micro-batches in a batch")
    main(parser.parse_args())
