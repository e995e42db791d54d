"""The same steps in one process, without RPC and DDP: what `main.py --check` holds the trainers against."""

import torch
from torch import nn


def steps_alone(batches, args):
    """Train on the batches of all trainers.

    Each trainer's loss is the mean over its own batch. What the trainers do together is then:

        dense part   one step with the mean of their gradients: DDP
        table        one step after the other, with each gradient: as far as one step with their sum

    Args:
        batches: for each step, a batch (indices, offsets, target) of each trainer.
        args: the flags of the run.

    Returns:
        For each step the new dense part and the new rows of the table that any trainer has looked up, as flat lists;
        and how long the table's first step would be, against this one, if the loss were the mean over all samples.
    """
    torch.manual_seed(args.seed)  # as on the server
    table = nn.EmbeddingBag(args.num_embeddings, args.embedding_dim, mode="sum")
    torch.manual_seed(args.seed)  # as on the trainers
    fc = nn.Linear(args.embedding_dim, args.num_classes)
    optimizer = torch.optim.SGD([{"params": table.parameters()},
                                 {"params": fc.parameters(), "lr": args.lr / len(batches[0])}], lr=args.lr)
    steps, share = {"dense": [], "tables": []}, None
    for of_all_trainers in batches:
        losses = [nn.functional.cross_entropy(fc(table(indices, offsets)), target)
                  for indices, offsets, target in of_all_trainers]
        if share is None:
            samples = [len(target) for _, _, target in of_all_trainers]
            joined = sum(loss * n for loss, n in zip(losses, samples, strict=True)) / sum(samples)
            by_joined, by_sum = (torch.autograd.grad(loss, table.weight, retain_graph=True)[0].norm()
                                 for loss in (joined, sum(losses)))
            share = (by_joined / by_sum).item()
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        looked_up = torch.cat([indices for indices, _, _ in of_all_trainers]).unique()
        steps["dense"].append(torch.cat([param.detach().flatten() for param in fc.parameters()]).tolist())
        steps["tables"].append(table.weight.detach()[looked_up].flatten().tolist())
    return steps, share
