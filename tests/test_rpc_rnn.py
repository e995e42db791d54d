"""Tutorial 6_5, second half."""

import json
import math
from types import SimpleNamespace

from common.launch import launch

import pytest
import torch

from exercises import round_trips
from rpc_rnn import main as rpc_rnn
from rpc_rnn import results
from rpc_rnn.data import MarkovChain, load_language
from tests.helpers import ROOT, args_of, results_of, script

# --- the data


def test_floor_is_what_a_perfect_model_reaches():
    """The entropy is computed from the probabilities alone; here it is compared with a sample."""
    chain = MarkovChain(seed=3)
    tokens = chain.draw(200_000, seed=1).tolist()
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    loss = -sum(math.log(chain.next_token[triple]) for triple in triples) / len(triples)
    assert loss == pytest.approx(chain.entropy_rate(), rel=0.01)
    assert chain.entropy_rate() < 0.8 * chain.entropy_without_memory() < 0.8 * math.log(10)


def test_entropy_of_a_known_chain():
    chain = MarkovChain(seed=0, ntoken=4)
    chain.next_token[:] = 0
    for a in range(4):
        for b in range(4):  # half the time a + 1, half the time a + 2: only a model that remembers a can know
            chain.next_token[a, b, (a + 1) % 4] = chain.next_token[a, b, (a + 2) % 4] = 1 / 2
    assert chain.entropy_rate() == pytest.approx(math.log(2))
    assert chain.entropy_without_memory() == pytest.approx(math.log(4))


def test_data_are_no_uninitialized_memory(tmp_path):
    """The tutorial's are torch.LongTensor(rows, columns): whatever was there."""
    one, again, other = (load_language(args_of(rpc_rnn, tmp_path, "--seed", seed)) for seed in (0, 0, 1))
    assert torch.equal(one.train, again.train)
    assert not torch.equal(one.train, other.train)
    assert not torch.equal(one.train[: len(one.val)], one.val)
    assert set(one.train.tolist()) == set(range(one.ntoken)) == set(one.val.tolist())


def test_text_and_tokens(tmp_path):
    path = ROOT / "README.ja.md"
    language = load_language(args_of(rpc_rnn, tmp_path, "--corpus", path))
    assert "".join(language.vocabulary[token] for token in torch.cat([language.train, language.val])) == path.read_text()


@pytest.mark.parametrize(("content", "says"), [
    (b"", "it has 0"), (b"too short", "it has 9"), (b"\x80\x81" * 5000, "this is no text"),
    (b"text\0" * 5000, "this is no text"),
])
def test_no_text(content, says, tmp_path, refused):
    path = tmp_path / "corpus"
    path.write_bytes(content)
    refused(rpc_rnn.main, ["--corpus", str(path)], ["--corpus", str(path), "UTF-8 text of at least 400", says])


# --- the training


def test_round_trips(tmp_path):
    """The pages say seven, whatever the number of layers."""
    args = args_of(rpc_rnn, tmp_path, "--epochs", 1, "--batch_size", 2000, "--nlayers", 2)
    assert {*launch(round_trips.count, args, rpc_rnn.role_name)["round_trips"]} == {7}


@pytest.mark.parametrize("val_loss", [1000.0, math.nan])
def test_no_perplexity(val_loss):
    """A finite loss may have a perplexity that overflows a float."""
    history = SimpleNamespace(bar=SimpleNamespace(close=lambda: None), epochs=[{"loss": 1.0, "val_loss": val_loss}])
    with pytest.raises(results.NotFiniteError, match="after epoch 1: training has diverged"):
        results.summary(history, None, None, None)


@pytest.mark.slow
def test_it_learns(tmp_path):
    folder, _ = results_of(script("rpc_rnn/main.py", "--epochs", 3, "--batch_size", 60, "--lr", 0.01), tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["initial_val_loss"] == pytest.approx(math.log(10), rel=0.02)
    final = metrics["epochs"][-1]["val_loss"]
    assert 0.98 * metrics["entropy_floor"] < final < 1.05 * metrics["entropy_floor"]
    assert final < metrics["floor_without_memory"]
