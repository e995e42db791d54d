"""One batch of random images and one-hot targets, always the same: so the loss on it can fall."""

import torch
from torch.nn import functional as F


def get_batch(args):
    """The tutorial's data, drawn once.

    Returns:
        Images (batch_size, 3, image_size, image_size) and one-hot targets (batch_size, num_classes), both of
        torch's default type.
    """
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, generator=generator)
    one_hot_indices = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    return images, F.one_hot(one_hot_indices, args.num_classes).to(images.dtype)
