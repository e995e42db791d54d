"""The flags that main.py, schedules.py and their benchmark share."""

from common.cli import bounded


def add_flags(parser, archs):
    """Add them to a parser, which is returned; `archs` are the models that there are."""
    add, count = parser.add_argument, bounded(int, at_least=1)
    add("--num_splits", type=bounded(int, at_least=1, at_most=1000), nargs="+", metavar="N",
        default=[1, 2, 4, 8], help="numbers of micro-batches to try, and 1, to compare with")
    add("--batch_size", type=count, default=32, metavar="N", help="images in a batch")
    add("--image_size", type=bounded(int, at_least=32), default=128, metavar="N", help="pixels")
    add("--num_batches", type=count, default=3, metavar="N", help="timed, for each of --num_splits")
    add("--num_classes", type=bounded(int, at_least=2), default=1000, metavar="N", help="targets")
    add("--arch", choices=archs, default="resnet50", help="of torchvision")
    add("--lr", type=bounded(float, above=0), default=0.05, help="learning rate of SGD")
    add("--timeline", action="store_true", help="draw a timeline of every process (PNG and JSON)")
    return parser
