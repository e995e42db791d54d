"""benchmarks/one_process.py with EnvPool's environments: a batch of them steps in C++, in threads.

Run by `python -m benchmarks.peers`, with the Python of an environment that has EnvPool
(envpool.txt). Agent, training and flags are those of one_process.py; `--envs` means nothing here.
"""

import envpool
import numpy as np
import torch

from batch_rl.results import ENV_NAME
from batch_rl.vector import Environments
from benchmarks import one_process


class PooledEnvironments(Environments):
    """Holds K environments of EnvPool, which reset themselves as gymnasium's: NEXT_STEP."""

    def __init__(self, num_envs: int, kind: str) -> None:
        self.envs = envpool.make_gymnasium(ENV_NAME, num_envs=num_envs, seed=torch.initial_seed())

    def reset(self, n_steps: int, seed: int) -> np.ndarray:
        """Begin as `Environments.reset`; but EnvPool takes a seed when it is made, and no other."""
        return super().reset(n_steps, seed=None)


if __name__ == "__main__":
    one_process.Environments = PooledEnvironments
    one_process.main()
