"""A ResNet of torchvision, split in two, and the same one whole (tutorial 6_7, "分散パイプライン並列処理")."""

import threading
import time

import torch
from common import timeline
from common.vision import import_torchvision
from torch import nn
from torch.distributed.rpc import RRef

ARCHS = ("resnet18", "resnet50")


def whole_resnet(arch, num_classes, seed):
    """A model of torchvision, on the CPU, with the initial weights that belong to `seed`."""
    torch.manual_seed(seed)
    return getattr(import_torchvision().models, arch)(num_classes=num_classes)


class ResNetBase(nn.Module):
    """What both shards share: a lock, a device, a way to be called over RPC.

    Args:
        first: the layer or layers with which the shard begins; the other layers follow as `rest`.
        device: where the shard computes; tensors come and go on the CPU, which is what RPC carries.
    """

    def __init__(self, first, rest, device):
        super().__init__()
        # RPC calls `forward` in many threads, one for each micro-batch. Each alone is as fast as the cores are; two at
        # a time would only make the next stage wait for its first micro-batch, and both would write into the running
        # statistics of BatchNorm at once.
        self._lock = threading.Lock()
        self.device = device
        self.first, self.rest = first.to(device), rest.to(device)

    def forward(self, x_rref, micro_batch):
        """Called over RPC: fetch a micro-batch from where it is, compute, keep the result here for who asks."""
        x = x_rref.to_here().to(self.device)  # outside the lock: the next one may travel while this one is computed
        with self._lock:
            return self.compute(x, micro_batch).cpu()

    def compute(self, x, micro_batch):
        """The layers of this shard, on its device. `micro_batch` is its number, for the timeline."""
        with timeline.span("forward", micro_batch=micro_batch):
            first = self.first(x)
            out = self.rest(first)
        if timeline.is_on() and out.requires_grad:
            _record_backward(x, first, out, micro_batch)
        return out

    def set_mode(self, training):
        """BatchNorm with the statistics of each micro-batch, or with the running ones. (`train` would return all.)"""
        self.train(training)

    def parameter_rrefs(self):
        """An RRef for each parameter, for a `DistributedOptimizer` elsewhere."""
        return [RRef(param) for param in self.parameters()]


class ResNetShard1(ResNetBase):
    """Images (N, 3, H, W) to features: (N, 512, H/8, W/8) with resnet50, (N, 128, H/8, W/8) with resnet18."""

    def __init__(self, arch, num_classes, seed, device):
        whole = whole_resnet(arch, num_classes, seed)
        rest = nn.Sequential(whole.bn1, whole.relu, whole.maxpool, whole.layer1, whole.layer2)
        super().__init__(whole.conv1, rest, device)


class ResNetShard2(ResNetBase):
    """Those features to logits (N, num_classes)."""

    def __init__(self, arch, num_classes, seed, device):
        whole = whole_resnet(arch, num_classes, seed)
        super().__init__(whole.layer3, nn.Sequential(whole.layer4, whole.avgpool, nn.Flatten(), whole.fc), device)


def _record_backward(x, first, out, micro_batch):
    """Record this micro-batch's backward: from when the gradient of `out` comes until the last one here is computed.

    Which is that of the input, or, where the input is an image, those of the first layer's weights. On a GPU, all
    spans are the times in which work is handed to it.
    """
    started = []
    out.register_hook(lambda _: started.append(time.time()))

    def ended(*_):
        timeline.add("backward", started[0], time.time(), micro_batch=micro_batch)

    if x.requires_grad:
        x.register_hook(ended)
    else:
        first.grad_fn.register_hook(ended)


def parameters_of(model):
    """All parameters in one tensor, on the CPU, in an order that two shards together share with the whole model."""
    return torch.cat([param.detach().flatten().cpu() for param in model.parameters()])
