"""Tutorial 6_8, first half."""

import json
import time

import pytest
from torch.distributed import rpc

from param_server import batch_update
from tests.helpers import results_of, script

SMALL = ["--arch", "resnet18", "--image_size", "32", "--batch_size", "4", "--num_classes", "5"]


@pytest.mark.slow
def test_it_learns(tmp_path):
    """A smaller model than the default, and more updates."""
    command = script("param_server/batch_update.py", "--world_size", 3, "--num_updates", 15, *SMALL, "--batch_size", 16)
    folder, _ = results_of(command, tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["updates"]) == len(metrics["loss"]) == 15
    assert sum(metrics["loss"][-3:]) < 0.8 * sum(metrics["loss"][:3])
    for update in zip(*(metrics[what] for what in ("compute", "transfer", "waiting")), strict=True):
        assert min(update) > 0
    assert 0.2 < metrics["peak_memory_gb"] < 6


LIMIT_S = 0.5  # timeout of a call without a timeout of its own


def run_slowly(rank, world_size, args):
    """Run a training that takes longer than the timeout of the server's calls."""
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
    """In the tutorial, a training run that takes longer than one RPC may (60 s) ends with an error."""
    monkeypatch.setattr(batch_update, "run_worker", run_slowly)
    flags = ["--world_size", "2", "--num_updates", "4", "--output_dir", str(tmp_path), *SMALL]
    metrics = batch_update.main(flags)
    assert len(metrics["loss"]) == 4
    assert capfd.readouterr().err == ""
