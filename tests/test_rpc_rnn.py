"""Tutorial 6_5, second half."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from rpc_rnn import main as rpc_rnn
from rpc_rnn import results
from rpc_rnn.data import MarkovChain, load_language
from tests.helpers import ROOT, args_of, results_of, script

MAIN = "rpc_rnn/main.py"
TEXT = ROOT / "README.ja.md"
SHORT = ["--corpus", str(TEXT), "--epochs", "1", "--batch_size", "4", "--nhid", "8"]  # some 30 steps


# --- what there is to learn


def test_floor_is_what_a_perfect_model_reaches():
    """The entropy is computed from the probabilities alone; here they are held against a sample."""
    chain = MarkovChain(seed=3)
    tokens = chain.draw(200_000, seed=1).tolist()
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    loss = -sum(math.log(chain.next_token[triple]) for triple in triples) / len(triples)
    assert loss == pytest.approx(chain.entropy_rate(), rel=0.01)
    assert chain.entropy_rate() < 0.8 * chain.entropy_without_memory() < 0.8 * math.log(10)
    assert chain.pairs().sum() == pytest.approx(1)
    assert chain.pairs().sum(axis=0) == pytest.approx(chain.pairs().sum(axis=1))  # as many come as go


def test_entropy_of_known_chains():
    chain = MarkovChain(seed=0, ntoken=4)
    chain.next_token[:] = 1 / 4
    assert chain.entropy_rate() == pytest.approx(math.log(4))
    assert chain.entropy_without_memory() == pytest.approx(math.log(4))
    chain.next_token[:] = 0
    for a in range(4):
        for b in range(4):  # half the time a + 1, half the time a + 2: only who remembers a can know
            chain.next_token[a, b, (a + 1) % 4] = chain.next_token[a, b, (a + 2) % 4] = 1 / 2
    assert chain.entropy_rate() == pytest.approx(math.log(2))
    assert chain.entropy_without_memory() == pytest.approx(math.log(4))


def test_data_are_no_uninitialised_memory(tmp_path):
    """The tutorial's are torch.LongTensor(rows, columns): whatever was there."""
    one, again, other = (load_language(args_of(rpc_rnn, tmp_path, "--seed", seed)) for seed in (0, 0, 1))
    assert torch.equal(one.train, again.train)
    assert not torch.equal(one.train, other.train)
    assert not torch.equal(one.train[: len(one.val)], one.val)
    assert set(one.train.tolist()) == set(range(one.ntoken)) == set(one.val.tolist())


# --- what it computes


def test_check_passes_through_a_checkpoint(tmp_path):
    """A text, two layers: one epoch, the other one resumed; the user's own checkpoint is left alone."""
    saved = tmp_path / "run.pt"
    differences = rpc_rnn.main(["--check", "--corpus", str(TEXT), "--batch_size", "4", "--nlayers", "2", "--lr",
                                "0.02", "--checkpoint", str(saved), "--output_dir", str(tmp_path)])
    for title in ("stopped", "resumed"):
        assert differences[f"{title}, sample"] == differences[f"{title}, text"] == 0
    assert not saved.exists()


@pytest.mark.parametrize("val_loss", [1000.0, math.inf, math.nan])
def test_no_perplexity(val_loss, monkeypatch, tmp_path):
    """A finite loss may have one that is no float any more."""
    args = args_of(rpc_rnn, tmp_path, *SHORT)
    monkeypatch.setattr(rpc_rnn.rpc, "get_worker_info", lambda: SimpleNamespace(id=1, name="trainer"))
    history = results.History(args, range(2), [{"loss": 1.0, "val_loss": val_loss}], 1.0, None)
    language = load_language(args)
    with pytest.raises(results.NotFiniteError, match="after epoch 1: training has diverged"):
        results.summary(history, None, language, args)


@pytest.mark.slow
def test_it_learns(tmp_path):
    folder, lines = results_of(script(MAIN, "--epochs", 3, "--batch_size", 60, "--lr", 0.01), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["initial_val_loss"] == pytest.approx(math.log(10), rel=0.02)
    assert metrics["entropy_floor"] == MarkovChain(seed=0).entropy_rate()
    final = metrics["epochs"][-1]["val_loss"]
    assert 0.98 * metrics["entropy_floor"] < final < 1.05 * metrics["entropy_floor"]
    assert final < metrics["floor_without_memory"]
    assert metrics["rpc_round_trips_per_step"] == 7  # 2 forward, 3 backward, the step, the release of the context
    of_epochs = [line.split("  ")[0] for line in lines if "] epoch " in line]  # on a busy machine, there are others
    assert of_epochs == [f"[trainer] epoch {epoch}" for epoch in (1, 2, 3)]
    assert lines[-1].startswith("loss 2.30 -> 1.")
    assert "(the source's entropy is 1.18)" in lines[-1]
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.json"]


# --- what can go wrong


@pytest.mark.parametrize(("content", "says"), [
    (b"", "it has 0"), (b"too short", "it has 9"), (b"\x80\x81" * 5000, "this is no text"),
    (b"text\0" * 5000, "this is no text"),
])
def test_no_text(content, says, tmp_path, refused):
    path = tmp_path / "corpus"
    path.write_bytes(content)
    refused(rpc_rnn.main, ["--corpus", str(path)], ["--corpus", str(path), "UTF-8 text of at least 400", says])
