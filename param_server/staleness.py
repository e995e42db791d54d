"""How old the weights of each gradient are: counted on the server, in every run.

    steps of all trainers   ...   17        18        19        20   ...
    trainer1                   forward -------- backward ------- step      staleness 2
    trainer2                        step    forward      step              staleness 0

The staleness of a gradient is the number of steps, of whichever trainer, between the forward that
took the weights and the step that applies the gradient. Without others in between it is 0.
"""

import collections
import threading


class CountsSteps:
    """The part of a parameter server through which all steps go, and which counts them.

    `weights_lock` is held by whoever changes the weights, or copies them: a copy has no half step.
    """

    def __init__(self):
        self.weights_lock = threading.Lock()
        self.steps, self.read_at, self.staleness = 0, {}, {}

    def note_read(self, trainer):
        """The forward of a trainer takes the weights; None: of nobody who will step."""
        if trainer is not None:
            self.read_at[trainer] = self.steps

    def note_step(self, trainer):
        """The gradient that belongs to this trainer's last forward has been applied."""
        counts = self.staleness.setdefault(trainer, collections.Counter())
        counts[self.steps - self.read_at[trainer]] += 1
        self.steps += 1

    def apply_step(self, trainer, step):
        """Call `step`, which changes the weights, for a trainer."""
        with self.weights_lock:
            step()
            self.note_step(trainer)

    def get_staleness(self):
        """By trainer (its rank), how many of its steps had which staleness."""
        return {trainer: dict(counts) for trainer, counts in self.staleness.items()}


class CountedOptimizer:
    """An optimizer of one trainer, on the server: its steps go through the server's `apply_step`.

    Args:
        params: the server's parameters.
        server: an RRef of the server.
        trainer: the rank whose gradients it applies.
        defaults: the flags of the optimizer itself, such as `lr`.
    """

    def __init__(self, params, server, trainer, **defaults):
        super().__init__(params, **defaults)
        self.server, self.trainer = server.local_value(), trainer

    def step(self, closure=None):
        """Apply the gradients of this trainer."""
        self.server.apply_step(self.trainer, super().step)
