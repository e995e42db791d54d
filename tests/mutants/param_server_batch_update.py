"""Mistakes in `param_server/batch_update.py`."""

from tests.mutants import Mutant

MAIN = "param_server/batch_update.py"
SMALL = ["--arch", "resnet18", "--image_size", 32, "--batch_size", 4, "--num_classes", 5, "--world_size", 3]
LOCKED = """        with self.lock:  # around the sum, too: of two additions at once, one could be lost
            for total, g in zip(self.sums, grads, strict=True):
                total += g
"""
UNLOCKED = """        for total, g in zip(self.sums, grads, strict=True):
            total += g
        with self.lock:
"""


def mutant(name, file, old, new, check):
    """One that `--check` must see."""
    return Mutant(name, file, old, new, check=check, flags=SMALL, program=MAIN)


MUTANTS = [
    mutant("the tutorial's statistics", MAIN,
           "                buffer.copy_(mean)\n", "                pass\n", "statistics"),
    mutant("the server's zero_grad forgotten", MAIN,
           "            for total in self.sums:\n                total.zero_()\n", "", "gradients"),
    mutant("the server's gradients are dropped, the statistics stay", MAIN,
           "            for total in self.sums:\n                total.zero_()\n",
           "            self.optimizer.zero_grad(set_to_none=False)\n", "statistics"),
    mutant("the trainer's zero_grad forgotten", MAIN,
           "            self.m.zero_grad(set_to_none=False)", "            pass", "gradients"),
    mutant("the sum for the mean", MAIN,
           "            for total in self.sums:\n                total /= self.batch_update_size\n", "",
           "gradients"),
    mutant("the mean over all processes", MAIN,
           "total /= self.batch_update_size", "total /= self.batch_update_size + 1", "gradients"),
    mutant("addition outside the lock", MAIN, LOCKED, UNLOCKED, "additions"),
    mutant("a step before the last gradient", MAIN,
           "self.batch_update_size = args.world_size - 1", "self.batch_update_size = args.world_size - 2",
           "gradients|arrivals|error"),
    mutant("the gradient is added twice", MAIN,
           "                total += g\n", "                total += g\n                total += g\n",
           "gradients"),
    mutant("no statistics from the trainers", MAIN,
           "*(buffer.cpu() for buffer in running_statistics(self.m))",
           "*(torch.zeros_like(buffer) for buffer in running_statistics(self.m))", "statistics"),
    mutant("the weights of the beginning forever", MAIN,
           "            self.set_model(numbers)\n", "", "weights read"),
    mutant("all trainers draw the same", MAIN,
           "1000 * args.seed + self.rank", "1000 * args.seed", "images"),
    mutant("the same batch in every update", MAIN,
           "            noise = torch.randn(args.batch_size, *size, generator=self.generator)\n",
           "            noise = torch.randn(args.batch_size, *size,\n"
           "                                generator=torch.Generator().manual_seed(self.rank))\n", "images"),
    mutant("targets of other images", MAIN,
           "patterns[self.one_hot_indices.squeeze(1)] + noise",
           "patterns[self.one_hot_indices.squeeze(1).flip(0)] + noise", "images"),
    mutant("trainers in evaluation mode", MAIN,
           "        self.set_model(self.ps_rref.rpc_sync().get_model())\n",
           "        self.set_model(self.ps_rref.rpc_sync().get_model())\n        self.m.eval()\n", "training mode"),
    mutant("no momentum", MAIN, "lr=args.lr, momentum=0.9)", "lr=args.lr)", "weights"),
    mutant("the step is forgotten", MAIN, "            self.optimizer.step()\n", "", "weights|gradients"),
    mutant("the loss as a sum", MAIN, "nn.MSELoss()", "nn.MSELoss(reduction='sum')", "losses"),
    mutant("the loss of the first trainer only", "param_server/batch_update_results.py",
           '"loss": means["loss"]', '"loss": [update[0]["loss"] for update in updates]', "mean losses"),
]
