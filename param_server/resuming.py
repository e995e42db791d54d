"""What a checkpoint keeps of a parameter server, and how it goes on from there."""

import torch
from common import checkpoint


class Resumes:
    """The part of a parameter server that is saved: weights, epochs, random numbers.

    Args:
        args: the flags, with `resume` and `checkpoint`; the weights are in `self.model`.
    """

    def __init__(self, args):
        self.args, self.first_epoch = args, 0
        if args.resume:
            state = checkpoint.load(args)
            self.model.load_state_dict(state["model"])
            self.first_epoch = state["epochs"]
            if "random_numbers" in state:  # checkpoints of earlier versions have none
                torch.set_rng_state(state["random_numbers"])

    def get_first_epoch(self):
        """With which a training begins: 0, or that of the checkpoint."""
        return self.first_epoch

    def save(self, epochs):
        """Write a checkpoint, on this machine, if its own flags name a file."""
        if self.args.checkpoint is not None:
            # With the state of the random numbers: dropout goes on as if the run had never stopped.
            checkpoint.save(self.args, {"model": self.model.state_dict(), "epochs": epochs,
                                        "random_numbers": torch.get_rng_state()})
