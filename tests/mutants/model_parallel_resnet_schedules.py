"""Mistakes in the schedules of `torch.distributed.pipelining` (beside tutorial 6_7)."""

from tests.mutants import Mutant

MAIN = "model_parallel_resnet/schedules.py"
SMALL = ("--arch", "resnet18", "--num_splits", "1", "2")


def mutant(name, old, new, check):
    """All with the smaller model."""
    return Mutant(name, MAIN, old, new, check=check, flags=SMALL)


MUTANTS = [
    mutant("zero_grad forgotten", "        self.opt.zero_grad()\n", "", "weights"),
    mutant("gradients not divided by the number of micro-batches",
           "loss_fn=nn.MSELoss())", "loss_fn=nn.MSELoss(), scale_grads=False)", "weights"),
    mutant("loss of the last micro-batch only",
           "return sum(loss.item() for loss in losses) / num_split if losses else None",
           "return losses[-1].item() if losses else None", "losses"),
    mutant("only the last stage steps", "        self.opt.step()\n",
           "        self.rank == 1 and self.opt.step()\n", "steps"),
    mutant("always the first schedule", "self.schedules[num_split].step(self.inputs)\n",
           "self.schedules[1].step(self.inputs)\n", "."),
    mutant("clock started only once", "            started = time.time()\n",
           "            started = locals().get('started') or time.time()\n", "timed"),
    mutant("micro-batches not counted anew", "        self.model.micro_batch, losses = 0, []\n",
           "        losses = []\n", "micro-batches"),
]
