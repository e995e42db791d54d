"""Tutorial 6_8, first half."""

import json
import time

import pytest
from torch.distributed import rpc

from param_server import batch_update
from tests.helpers import commands_in, results_of, script

MAIN = "param_server/batch_update.py"
SMALL = ["--arch", "resnet18", "--image_size", "32", "--batch_size", "4", "--num_classes", "5"]


@pytest.mark.slow
def test_it_learns(tmp_path):
    """The README's command, with a smaller model."""
    command = next(command for command in commands_in("param_server/README.md") if command[1] == MAIN)
    folder, lines = results_of(
        script(*command[1:], "--world_size", 3, "--num_updates", 15, *SMALL, "--batch_size", 16), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["updates"]) == len(metrics["loss"]) == 15
    assert sum(metrics["loss"][-3:]) < 0.8 * sum(metrics["loss"][:3])
    for update in zip(*(metrics[what] for what in ("compute", "transfer", "waiting")), strict=True):
        assert min(update) > 0
    assert 0.2 < metrics["peak_memory_gb"] < 6
    assert [line.split("  loss ")[0] for line in lines[:-2]] == [f"[trainer1] update {n}" for n in range(1, 16)]
    assert (folder / "batch_update.png").exists()


LIMIT_S = 0.5  # of a call that gives none of its own


def run_slowly(rank, world_size, args):
    """A training that takes longer than the server's process lets a call take."""
    original, call_trainers = batch_update.Trainer.get_next_batch, batch_update.run_ps

    def slow(self):
        for batch in original(self):
            time.sleep(LIMIT_S)
            yield batch

    def impatient(*arguments):
        rpc._set_rpc_timeout(LIMIT_S)
        with pytest.raises(RuntimeError, match="(?i)time"):  # the limit holds
            rpc.rpc_sync("trainer1", time.sleep, args=(3 * LIMIT_S,))
        return call_trainers(*arguments)

    batch_update.Trainer.get_next_batch, batch_update.run_ps = slow, impatient
    return batch_update.run_worker(rank, world_size, args)


def test_longer_than_the_timeout(capfd, monkeypatch, tmp_path):
    """In the tutorial, a training that takes longer than one RPC may (60 s) ends with an error."""
    monkeypatch.setattr(batch_update, "run_worker", run_slowly)
    flags = ["--world_size", "2", "--num_updates", "4", "--output_dir", str(tmp_path), *SMALL]
    metrics = batch_update.main(flags)
    assert len(metrics["loss"]) == 4
    assert capfd.readouterr().err == ""
