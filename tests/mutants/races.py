"""Locks and barriers left out, of all programs: each check makes the race happen that they prevent.

Those of a program's own subject are among its mutants (`shared_memory.py`: its three barriers; `main.py` of ddp_basic,
p2p_collectives and model_parallel_resnet, batch_update.py). Without one, for no check could see it:

- `global_lock` of param_server/main.py: rank 0 makes the server before it joins, so no call can come earlier. It stays, as
  the tutorial's, for whoever calls in another order.
- The barrier of fast_ring.py: without it the connections are not there yet, and keep their large buffers. That is speed alone.
- The barrier of mesh.py: `load()` ends with a gathering, behind which nobody reads any more. It does not promise that.
- Those of deadlock.py: they are the mistake that is shown, and its remedy.
"""

from tests.mutants import Mutant

RESNET = ("--arch", "resnet18", "--num_splits", "3")


def unlocked(name, file, inside, check, lock="self.lock", program="", flags=()):
    """Enter `inside`, the first line under a lock, without it."""
    return Mutant(name, file, f"with {lock}:{inside}", f"if True:{inside}", check=check, program=program, flags=flags)


def forgotten(name, file, barrier, check, program="", flags=()):
    """Leave out a line of its own."""
    return Mutant(name, file, barrier + "\n", "pass\n", check=check, program=program, flags=flags)


MUTANTS = [
    unlocked("observers ask at the same time", "batch_rl/main.py", "\n            # Tutorial: copied", "forwards|error"),
    unlocked("vector environments ask at the same time", "batch_rl/vector.py", "\n            self.states[ob_id]",
             "forwards|error"),
    unlocked("two micro-batches in the second shard", "model_parallel_resnet/main.py", "\n            out = self.fc",
             "one micro-batch at a time|running", lock="self._lock", flags=RESNET),
    unlocked("a step between counting a read and reading", "param_server/async_server.py",
             "\n            self.note_read", "staleness"),
    unlocked("a step between another and its count", "param_server/async_server.py",
             "\n            super().step()", "staleness", lock="server.lock"),
    forgotten("the clocks of the ranks start apart", "ddp_basic/skew.py",
              "dist.barrier()  # the clocks of all ranks start together", "skew, the clocks"),
    forgotten("the first to come counts its wait", "p2p_collectives/ring_allreduce.py",
              "dist.barrier()  # otherwise the first rank would count its wait for the last one", "clocks"),
    forgotten("the first to come counts its wait, in shared memory", "p2p_collectives/ring_allreduce.py",
              "dist.barrier()  # otherwise the first rank would count its wait for the last one", "clocks",
              program="p2p_collectives/shared_memory.py"),
    forgotten("memory is closed before all have opened it", "p2p_collectives/shared_memory.py",
              "dist.barrier()  # every rank has opened the files of all ranks", "error"),
    forgotten("nobody waits until all are there", "param_server/main.py", "self.all_have_joined.wait()", "losses"),
]
