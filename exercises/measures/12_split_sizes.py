"""Counts the images that the first half of `single_machine.py`'s pipeline gets in each piece."""

import argparse

import torch
from common import report

from model_parallel_resnet import single_machine as lesson
from model_parallel_resnet.data import require_split_sizes


def pieces(args: argparse.Namespace) -> dict[int, list[int]]:
    """Return for each split size the images in each of its micro-batches."""
    resnet, inputs, _ = lesson.resnet50_and_batch(args)
    pipeline, seen = lesson.PipelineParallelResNet50(resnet, args.devices), []
    pipeline.seq1.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    counted = {}
    for size in args.measured_sizes:
        pipeline.split_size = size
        with torch.no_grad():
            pipeline(inputs)
        counted[size] = [*seen]
        seen.clear()
    return counted


if __name__ == "__main__":
    flags = lesson.build_parser().parse_args()
    flags.example = "exercises/12_split_sizes"
    flags.devices = lesson.choose_devices(flags)
    require_split_sizes(flags, lesson.SPLIT_SIZES, lesson.NUM_CLASSES)
    report.save_metrics(flags, {"pieces": pieces(flags)}, backend=None)
