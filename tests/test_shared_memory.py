"""Tutorial 6_4, beyond the ring: collectives in memory that the ranks of one machine share."""

import os
import struct
from pathlib import Path

import pytest
import torch

from p2p_collectives import shared_memory
from p2p_collectives.ring_allreduce_results import fit
from p2p_collectives.shared_memory import SharedMemory
from p2p_collectives.shared_memory_results import (
    hierarchical_seconds,
    require_right,
    shared_seconds,
    traffic,
)
from tests.helpers import bad


@pytest.mark.parametrize(("per_machine", "ways"), [
    ([], ["gloo", "ring", "shared_memory", "shared_memory_copied"]),
    (["--ranks_per_machine", "1"], ["gloo", "ring", "hierarchical"])])
def test_rows_and_picture(per_machine, ways, tmp_path, capfd):
    memory = set(Path("/dev/shm").iterdir())
    metrics = shared_memory.main(["--world_size", "2", "--sizes", "65536", "800000", "--repeats", "1", *per_machine,
                                  "--output_dir", str(tmp_path / "out")])
    out, err = capfd.readouterr()
    assert err == ""
    assert out.splitlines()[-2].startswith(f"781.2 KiB on 2 ranks: all_reduce by {ways[2]} takes ")
    of_all_reduce = [row for row in metrics["rows"] if row["collective"] == "all_reduce"]
    assert [row["way"] for row in of_all_reduce] == ways * 2
    assert [row["vs_gloo"] for row in metrics["rows"] if row["way"] == "gloo"] == [1] * 6
    assert ("memory_GBps" in metrics) <= (not per_machine)
    width, height = struct.unpack(">II", (tmp_path / "out/collectives.png").read_bytes()[16:24])
    assert min(width, height) > 300
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
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks of this machine .* barrier for 0\.05 s"):
        shared.barrier()
    os.close(outbox)
    with pytest.raises(ConnectionError, match="has ended"):
        shared.barrier()


def test_what_is_wrong_is_not_timed():
    right = torch.arange(8.0)
    for collective, wrong in (("all_reduce", right + 1), ("reduce_scatter", 2 * right), ("all_gather", 2 * right)):
        with pytest.raises(ArithmeticError, match=f"{collective} by ring is wrong for 32 B"):
            require_right(collective, "ring", wrong, rank=1, world_size=2)
    require_right("all_reduce", "ring", 2 * right + 1, rank=1, world_size=2)
    require_right("reduce_scatter", "ring", torch.tensor([9.0] * 4 + [9, 11, 13, 15]), rank=1, world_size=2)
    require_right("all_gather", "ring", torch.tensor([0.0, 1, 2, 3, 5, 6, 7, 8]), rank=1, world_size=2)


def test_models_are_recovered():
    points = [(2, traffic("all_reduce", 4, n_bytes), shared_seconds("all_reduce", 4, n_bytes, 1e-5, 2e10))
              for n_bytes in (2**14, 2**20, 2**26)]
    assert fit(points) == pytest.approx((1e-5, 2e10))
    # One machine: no ring. Two of one rank: a ring of two, beside barriers of one rank.
    assert hierarchical_seconds(1, 4, 2**20, (1e-3, 1e9, 1e-5, 2e10)) == pytest.approx(4e-5 + 11 * 2**20 / 2e10)
    assert hierarchical_seconds(2, 1, 2**20, (1e-3, 1e9, 0, 1e30)) == pytest.approx(2e-3 + 2**20 / 1e9)


@pytest.mark.parametrize(("given", "says"), [
    bad("--sizes", 8, says=("--sizes 8 must be a multiple of 16",)),
    bad("--sizes", 24, "--dtype", "int64", "--world_size", 2, says=("--sizes 24 must be a multiple of 16",)),
    bad("--sizes", 0, says=("--sizes", "0", "at least 1")),
    bad("--ranks_per_machine", 3, says=("--ranks_per_machine 3 must be a divisor of 4",)),
    bad("--ranks_per_machine", 8, says=("--ranks_per_machine 8 must be a divisor of 4",)),
    bad("--dtype", "float16", says=("--dtype", "float16", "float64")),
])
def test_bad_input(given, says, refused):
    refused(shared_memory.main, given, says)


def test_only_where_memory_needs_no_name(monkeypatch, refused):
    monkeypatch.delattr(os, "memfd_create")
    refused(shared_memory.main, [], ("needs Linux",))
