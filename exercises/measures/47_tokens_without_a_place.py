"""Counts the tokens that the experts of `transformer_parallel/experts.py` drop.

The router is set so that a given number of tokens wants each expert. No processes are needed: what
is dropped is decided on each rank by itself.
"""

import argparse

import torch
from common import report
from common.cli import Parser, bounded

from transformer_parallel.experts import Experts


def dropped_of(counts: list[int], capacity_factor: float) -> int:
    """Return how many tokens of a rank get no place.

    Args:
        counts: how many want each expert.
        capacity_factor: of the lesson's flags.

    Raises:
        RuntimeError: if the router has chosen something else.
    """
    n = len(counts)
    layer = Experts(n, argparse.Namespace(experts=n, capacity_factor=capacity_factor))
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(n))  # a token of 1 in its i-th unit wants expert i
        layer(torch.eye(n).repeat_interleave(torch.tensor(counts), dim=0)[None])
    if layer.counts.tolist() != counts:
        raise RuntimeError(f"the experts were wanted by {layer.counts.tolist()}, not {counts}")
    return layer.dropped.item()


def ranks_of(text: str) -> list[list[int]]:
    """Read "6 2, 2 6": the counts of each rank."""
    return [[int(count) for count in of_rank.split()] for of_rank in text.split(",")]


def main(args: argparse.Namespace) -> None:
    """Count with each capacity factor, over all ranks."""
    dropped = {text: [sum(dropped_of(of_rank, factor) for of_rank in ranks_of(text))
                      for factor in args.capacity_factors]
               for text in args.counts}
    report.save_metrics(args, {"dropped": dropped}, backend=None)


if __name__ == "__main__":
    parser = Parser("exercises/47_tokens_without_a_place", __doc__, distributed=False)
    parser.add_argument("--counts", nargs="+", default=["10 3 2 1", "6 2, 2 6"], metavar="TOKENS",
                        help="how many tokens want each expert, of each rank")
    parser.add_argument("--capacity_factors", type=bounded(float, above=0), nargs="+",
                        default=[1.0, 1.25], metavar="F", help="see the lesson")
    main(parser.parse_args())
