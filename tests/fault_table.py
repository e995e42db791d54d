"""What ends a run, how it is reported: the rows that the tests try, and that docs/faults.md shows.

The tests take from here which line they expect, and `benchmarks.docs` writes the tables of the pages from here.
A line is a pattern (`re.fullmatch`) with {timeout} in it; it follows "error: rank 1 (observer1) ".
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One row: what happens to a rank, and what is reported of it."""

    what: str  # English
    what_ja: str
    line: str  # in a local run and in each terminal of a manual launch
    torchrun: str | None = None  # under torchrun, if it is another one; "" where it is not tried
    by_silence: bool = False  # it is noticed after --timeout, not at once
    note: str = ""  # on the page
    note_ja: str = ""

    def expected(self, way="local"):
        """The line in one of the three ways in, as a pattern."""
        return self.torchrun if way == "torchrun" and self.torchrun is not None else self.line

    def within_s(self, timeout_s):
        """By when the run must have ended everywhere."""
        return 10 + (timeout_s if self.by_silence else 0)


SILENT = r"has not answered for \d+ s"
DIED = "died; torchrun shows how"

OF_A_RANK = {
    "exception": Fault("it raises ValueError", "ValueErrorを送出する", "raised ValueError"),
    "SIGKILL": Fault("SIGKILL, out of memory", "SIGKILL、メモリー不足", "was killed by SIGKILL", DIED),
    "SIGSTOP": Fault("SIGSTOP, a machine that swaps itself to a standstill", "SIGSTOP、スワップで固まったマシン",
                     SILENT, by_silence=True),
}
