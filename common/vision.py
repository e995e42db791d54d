"""torchvision, also beside a CPU-only torch."""

import sys
from types import ModuleType


def import_torchvision() -> ModuleType:
    """Import torchvision and return it.

    The wheels of torchvision are linked against CUDA. With a CPU-only torch, their C++ operators do
    not load, and the import stops at the first Python rule for such an operator. The two missing
    operators serve only object detection, so declaring their schemas is enough for the models,
    datasets and transforms of the tutorials.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        import torch

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # the partly imported modules
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", schema)
        import torchvision
    return torchvision
