"""`--one_core`: what batch_rl's observers need on a machine that has one core for everything.

An observer's request leaves, and its answer comes in, through threads of its process. They take
microseconds, but on the only core they wait for the thread that plays, milliseconds each: with
double buffering little would overlap. Here that thread runs only while nobody else wants the core.
"""

import os

from batch_rl import double_buffering, vector


class GivesWay:
    """Plays as an observer, and gives way to all else."""

    def run_episode(self, *args):
        """Play as the observer. In Linux a scheduling policy belongs to the calling thread."""
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return super().run_episode(*args)


class VectorObserver(GivesWay, vector.VectorObserver):
    """Plays without double buffering."""


class DoubleBufferedObserver(GivesWay, double_buffering.DoubleBufferedObserver):
    """Plays with double buffering."""


class VectorAgent(vector.VectorAgent):
    """Decides without double buffering."""

    def __init__(self, world_size, args):
        super().__init__(world_size, args, VectorObserver)


class DoubleBufferedAgent(double_buffering.DoubleBufferedAgent):
    """Decides with double buffering."""

    def __init__(self, world_size, args):
        super().__init__(world_size, args, DoubleBufferedObserver)


VARIANTS = {"vector": VectorAgent, "double_buffering": DoubleBufferedAgent}
