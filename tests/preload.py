"""What the fork server of the tests imports besides torch: all that any lesson needs."""

import gymnasium  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401
from common.vision import import_torchvision

import_torchvision()
