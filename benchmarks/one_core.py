"""`--one_core`: what batch_rl's observers need on a machine that has one core for everything.

An observer's request leaves, and its answer comes in, through threads of its process. They take
microseconds, but on the only core they wait for the thread that plays, milliseconds each: with
double buffering little would overlap. Here that thread runs only while nobody else wants the core.
"""

import os

from batch_rl import double_buffering, vector_agent


class GivesWay:
    """An observer whose playing gives way to all else."""

    def run_episode(self, *args):
        """See the class beside it. In Linux a scheduling policy belongs to the calling thread."""
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return super().run_episode(*args)


class VectorObserver(GivesWay, vector_agent.VectorObserver):
    """Without double buffering."""


class DoubleBufferedObserver(GivesWay, double_buffering.DoubleBufferedObserver):
    """With double buffering."""


class VectorAgent(vector_agent.VectorAgent):
    """Without double buffering."""

    observer = VectorObserver


class DoubleBufferedAgent(double_buffering.DoubleBufferedAgent):
    """With double buffering."""

    observer = DoubleBufferedObserver


RUNGS = {"vector": VectorAgent, "double_buffering": DoubleBufferedAgent}
