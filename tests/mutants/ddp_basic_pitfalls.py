"""Mistakes in `ddp_basic/pitfalls.py`, besides the five that it is about."""

from tests.mutants import Mutant

PITFALLS = "ddp_basic/pitfalls.py"


def _pitfall(name, kind, old, new, check="losses"):
    return Mutant(name, PITFALLS, old, new, check=check,
                  flags=("--seed", 7, "--world_size", 3, "--lr", 0.05, "--steps", 5, "--timeout", 20, "--kind", *kind.split()))


MUTANTS = [
    _pitfall("the same half in each step", "unused", "self.heads[step % 2]", "self.heads[0]"),
    _pitfall("both halves in each step", "unused", "self.heads[step % 2](x)", "self.heads[0](x) + self.heads[1](x)"),
    _pitfall("all have as many batches", "uneven", "(args.steps + rank)", "args.steps", "steps"),
    _pitfall("zero_grad forgotten", "uneven", "        optimizer.zero_grad()\n", ""),
    _pitfall("a learning rate of its own", "uneven", "lr=args.lr", "lr=0.1"),
    _pitfall("the checkpointed layer leaves out what is before it", "reentrant", "checkpoint(self.net2, hidden,",
             "checkpoint(self.net2, x,"),
    _pitfall("the checkpoint stays re-entrant", "reentrant", "use_reentrant=not args.fixed", "use_reentrant=True", "error: rank"),
    _pitfall("the kept batches are files after all", "open_files --steps 20", "tensor.clone() for", "tensor for", "error: rank"),
    _pitfall("a mean whose gradients are this rank's", "batchnorm --fixed", "return MeanOfRanks.forward(ctx, gradient)", "return gradient"),
    _pitfall("a sum in place of the mean", "batchnorm --fixed", "return mean / dist.get_world_size()", "return mean"),
    _pitfall("the mean of this rank", "batchnorm --fixed", "mean = MeanOfRanks.apply(x.mean(dim=0))", "mean = x.mean(dim=0)"),
    _pitfall("the variance of this rank", "batchnorm --fixed", "variance = MeanOfRanks.apply((x - mean).square().mean(dim=0))",
             "variance = (x - mean).square().mean(dim=0)"),
    _pitfall("the samples of all ranks are those of rank 0", "batchnorm", "inputs, _ = toy_samples(rank, args.seed)",
             "inputs, _ = toy_samples(0, args.seed)"),
    _pitfall("the loss of rank 0 is that of all", "batchnorm", "dist.all_gather_object(losses, KINDS[args.kind](rank, args))",
             "losses = [KINDS[args.kind](rank, args)] * world_size"),
]
