"""What the fork server of the tests imports first: all that any lesson needs, and the lessons with their checks."""

import gc
import importlib
from pathlib import Path

gc.disable()  # nothing of it is garbage
for name in ("torch.distributed.rpc", "torch.distributed.optim", "torch._dynamo", "torch.distributed.checkpoint.state_dict",
             "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "gymnasium"):
    importlib.import_module(name)
for path in sorted(Path(__file__).parent.parent.glob("*_*/*check.py")):
    importlib.import_module(f"{path.parent.name}.{path.stem}")
importlib.import_module("common.vision").import_torchvision()
gc.enable()
