"""A server that serves all trainers at the same time (`--consistency async`): beyond tutorial 6_6.

Each forward works with copies of the weights as they are then, and its backward needs only these:
another trainer may step in between. The price is staleness: a gradient of weights that others have
changed meanwhile, by about N-1 steps of N equally fast trainers (`staleness.py` counts them).
"""

import copy
import threading

from common.session import keep_memory
from torch.func import functional_call

from param_server.main import ParameterServer


class AsyncParameterServer(ParameterServer):
    """A parameter server whose weights may change between a trainer's forward and its backward."""

    def __init__(self, args):
        super().__init__(args)
        self.thread = threading.local()

    def forward(self, inp, trainer=None):
        """Images (N, 1, 28, 28) to log-probabilities (N, 10), with copies of the weights."""
        if self.n_trainers == 1:  # nobody steps between forward and backward
            return super().forward(inp, trainer)
        with self.weights_lock:  # or a copy could have one half of another trainer's step
            self.note_read(trainer)
            # Gradients flow through the copies to the parameters.
            weights = {name: param.clone() for name, param in self.model.named_parameters()}
        inp = inp.to(self.input_device)
        return functional_call(self.stateless(), weights, (inp,)).to("cpu")

    def stateless(self):
        """The network as a stateless module, one for each thread: `functional_call` changes it.

        With one for all, a thread would put its copies where another has just put its own, and the
        wrong ones would stay there: the training goes on without an error, and without an effect.
        """
        if not hasattr(self.thread, "net"):
            self.thread.net = copy.deepcopy(self.model).to("meta")
        return self.thread.net.train(self.model.training)


def keep_freed_memory():
    """Let the threads in which RPC runs keep activations of a few megabytes: worth 20% or more."""
    keep_memory(blocks_up_to=2**25)
