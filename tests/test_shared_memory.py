"""Tutorial 6_4, beyond the ring: collectives in memory that the ranks of one machine share."""

import os
from pathlib import Path

import pytest

from p2p_collectives import shared_memory
from p2p_collectives.shared_memory import SharedMemory


def test_rows_and_picture(tmp_path, capfd):
    memory = set(Path("/dev/shm").iterdir())
    metrics = shared_memory.main(["--world_size", "2", "--sizes", "65536", "800000", "--repeats", "1",
                                  "--output_dir", str(tmp_path / "out")])
    out, err = capfd.readouterr()
    assert err == ""
    assert out.splitlines()[-2].startswith("781.2 KiB on 2 ranks: all_reduce by shared_memory takes ")
    of_all_reduce = [row for row in metrics["rows"] if row["collective"] == "all_reduce"]
    assert [row["way"] for row in of_all_reduce] == ["gloo", "ring", "shared_memory", "shared_memory_copied"] * 2
    assert [row["vs_gloo"] for row in metrics["rows"] if row["way"] == "gloo"] == [1] * 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["collectives.png", "metrics.json"]
    assert set(Path("/dev/shm").iterdir()) <= memory


@pytest.fixture
def waiting():
    """A rank of two, without the other one, and where that one would write."""
    shared = SharedMemory.__new__(SharedMemory)
    shared.place, shared.size, shared.timeout, shared.outboxes = 0, 2, 0.05, []
    shared.inbox, outbox = os.pipe()
    yield shared, outbox
    shared.close()


def test_a_barrier_does_not_wait_for_ever(waiting):
    shared, outbox = waiting
    with pytest.raises(TimeoutError, match=r"this machine's 2 ranks, 1 not heard of for 0\.05 s"):
        shared.barrier()
    os.close(outbox)
    with pytest.raises(ConnectionError, match="has ended"):
        shared.barrier()
