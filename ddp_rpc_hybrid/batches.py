"""What the lesson learns: ragged bags of indices, and a teacher who knows their classes. No other process here."""

import random

import torch
from torch.nn import functional as F

BATCHES = 10  # of each trainer in an epoch


class Teacher:
    """Decides on the targets, by a table and a linear layer of its own: a function that the model can learn."""

    def __init__(self, args):
        generator = torch.Generator().manual_seed(10_000 + args.seed)  # else its table would be the one to learn
        self.table = torch.randn(args.num_embeddings, args.embedding_dim, generator=generator)
        self.weight = torch.randn(args.num_classes, args.embedding_dim, generator=generator)

    def target(self, indices, offsets):
        """The class of each bag: shape (bags,)."""
        return F.linear(F.embedding_bag(indices, self.table, offsets, mode="sum"), self.weight).argmax(dim=1)


def get_next_batch(rank, epoch, teacher, args):
    """Yield the batches of one trainer in one epoch, always new ones: 20 to 50 indices in bags of 1 to 10."""
    seed = 1_000_000 * args.seed + 1000 * epoch + rank  # other batches on each trainer
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(BATCHES):
        num_indices = rng.randint(20, 50)
        indices = torch.randint(args.num_embeddings, (num_indices,), generator=generator)
        # Where each bag begins.
        offsets, start = [], 0
        while start < num_indices:
            offsets.append(start)
            start += rng.randint(1, 10)
        offsets = torch.tensor(offsets)
        yield indices, offsets, teacher.target(indices, offsets)
