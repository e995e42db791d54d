"""Tutorial 6_5, second half."""

import json
import math
import struct

import pytest
import torch

from rpc_rnn import main as rpc_rnn
from rpc_rnn.language import MarkovChain, columns, get_next_batch, load_language
from rpc_rnn.single_process import LocalRNNModel
from tests.helpers import ROOT, bad, end, run, running, script, torchrun

MAIN = "rpc_rnn/main.py"
TEXT = ROOT / "README.ja.md"
SHORT = ["--corpus", str(TEXT), "--epochs", "1", "--batch_size", "4", "--nhid", "8"]  # some 30 steps
SLOW_START_S = 100  # that a real process may take on a busy machine


def parsed(*flags):
    return rpc_rnn.build_parser().parse_args(["--output_dir", "/tmp", *map(str, flags)])


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


def test_data_are_no_uninitialised_memory():
    """The tutorial's are torch.LongTensor(rows, columns): whatever was there."""
    one, again, other = (load_language(parsed("--seed", seed)) for seed in (0, 0, 1))
    assert torch.equal(one.train, again.train)
    assert not torch.equal(one.train, other.train)
    assert not torch.equal(one.train[: len(one.val)], one.val)
    assert set(one.train.tolist()) == set(range(one.ntoken)) == set(one.val.tolist())


def test_targets_are_the_next_tokens():
    tokens = torch.arange(64)
    tables = [columns(tokens, batch_size=3, trainer=trainer, n_trainers=2) for trainer in range(2)]
    assert [table.shape for table in tables] == [(10, 3), (10, 3)]
    assert len(set(torch.cat(tables).flatten().tolist())) == 60  # no token is read by two trainers
    seen = []
    for data, target in get_next_batch(tables[1], bptt=4):
        assert torch.equal(target, data + 1)
        seen.append(len(data))
    assert seen == [4, 4, 1]


# --- what it computes


@pytest.mark.parametrize(("world_size", "flags"), [(2, ["--nlayers", "2"]), (3, ["--optimizer", "sgd", "--lr", "5"])])
def test_check_passes(world_size, flags, capfd, tmp_path):
    differences = rpc_rnn.main(["--check", "--world_size", str(world_size), "--output_dir", str(tmp_path), *flags])
    assert len(differences) == 7
    assert max(differences.values()) <= 1e-5
    out, err = capfd.readouterr()
    assert out.count(" ok\n") == 7
    assert err == ""


def fails(monkeypatch, capfd, folder, record_step, *given):
    """`--check` with another `record_step` in its workers: status 1; the verdicts."""
    monkeypatch.setattr(rpc_rnn, "record_step", record_step)
    with pytest.raises(SystemExit) as stop:
        rpc_rnn.main(["--check", "--output_dir", str(folder), *given])
    assert stop.value.code == 1
    rows = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[check]")]
    return {row.split("] ")[1].split(":")[0]: row.split()[-1] for row in rows}


def without_average(rank, world_size, args):
    rpc_rnn.average_table_gradients = lambda model, context_id: None
    return rpc_rnn.record_step(rank, world_size, args)


def test_check_sees_gradients_that_are_not_averaged(monkeypatch, capfd, tmp_path):
    """Of the second trainer's batch, the tables learn nothing then."""
    found = fails(monkeypatch, capfd, tmp_path, without_average, "--world_size", "3", "--optimizer", "sgd")
    assert [part for part in ("emb_table", "rnn", "decoder") if found[f"{part}, gradient"] == "FAIL"] == [
        "emb_table", "decoder"]


class Plain:
    """A local optimizer where the distributed one should be."""

    remote_optimizers = ()

    def __init__(self, optimizer_class, param_rrefs, lr):
        here = [rref.local_value() for rref in param_rrefs if rref.is_owner()]
        self.optimizer = torch.optim.SGD(here, lr=lr)

    def step(self, context_id):
        self.optimizer.step()


def with_a_plain_optimizer(rank, world_size, args):
    rpc_rnn.DistributedOptimizer = Plain
    return rpc_rnn.record_step(rank, world_size, args)


def test_a_plain_optimizer_does_nothing(monkeypatch, capfd, tmp_path):
    """With distributed autograd the gradients are in the context, not in `.grad`: the step is silent, and no step."""
    found = fails(monkeypatch, capfd, tmp_path, with_a_plain_optimizer)
    for part in ("emb_table", "rnn", "decoder"):
        assert found[f"{part}, gradient"] == "ok"
        assert found[f"{part}, weights after a step"] == "FAIL"


def test_it_learns(tmp_path):
    result = run(script(MAIN, "--epochs", 3, "--batch_size", 60, "--lr", 0.01), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    metrics = json.loads((tmp_path / "outputs/rpc_rnn/metrics.json").read_text())
    assert metrics["initial_val_loss"] == pytest.approx(math.log(10), rel=0.02)
    assert metrics["entropy_floor"] == MarkovChain(seed=0).entropy_rate()
    final = metrics["epochs"][-1]["val_loss"]
    assert 0.98 * metrics["entropy_floor"] < final < 1.05 * metrics["entropy_floor"]
    assert final < metrics["floor_without_memory"]
    assert metrics["perplexity"] == pytest.approx(math.exp(final))
    assert metrics["rpc_round_trips_per_step"] == 7  # 2 forward, 3 backward, the step, the release of the context
    assert metrics["steps_per_s"] > 0
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [f"[trainer] epoch {epoch}" for epoch in (1, 2, 3)]
    assert lines[-1].startswith("loss 2.30 -> 1.")
    assert "(the source's entropy is 1.18)" in lines[-1]
    width, height = struct.unpack(">II", (tmp_path / "outputs/rpc_rnn/loss.png").read_bytes()[16:24])
    assert min(width, height) > 300
    assert sorted(path.name for path in (tmp_path / "outputs/rpc_rnn").iterdir()) == ["loss.png", "metrics.json"]


def test_resume_continues_as_if_never_stopped(tmp_path, capfd):
    """On a Japanese text, with dropout on both processes and Adam's state on both."""
    saved, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = [*SHORT, "--dropout", "0.3", "--output_dir", str(tmp_path)]
    of_whole = rpc_rnn.main([*flags, "--epochs", "3", "--checkpoint", str(whole)])
    rpc_rnn.main([*flags, "--checkpoint", str(saved)])
    resumed = rpc_rnn.main([*flags, "--epochs", "3", "--checkpoint", str(saved), "--resume"])
    assert resumed["epochs"] == of_whole["epochs"]
    assert len(resumed["epochs"]) == 3
    assert len(resumed["sample"]) == rpc_rnn.SAMPLE_LENGTH
    assert set(resumed["sample"]) <= set(TEXT.read_text())
    assert resumed["entropy_floor"] is None

    # The checkpoint is the whole model: without RPC it has the same loss.
    state = torch.load(saved, weights_only=True)
    language = load_language(parsed(*flags))
    model = LocalRNNModel(language.ntoken, 32, 8, 1)
    model.load_state_dict(state["model"])
    table, hidden, total = columns(language.val, 4, 0, 1), None, 0.0
    with torch.no_grad():
        for data, target in get_next_batch(table, 35):
            output, hidden = model.eval()(data, hidden)
            loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()).item()
            total += loss * len(data) / (len(table) - 1)
    assert total == pytest.approx(resumed["epochs"][-1]["val_loss"], rel=1e-5)


# --- how it is started


def test_torchrun(tmp_path):
    """Two trainers: the process group and the RPC world meet at torchrun's store."""
    with running(torchrun(3, MAIN, *SHORT), tmp_path) as process:
        out, err = end(process, within_s=SLOW_START_S)
    assert process.returncode == 0, err
    assert out.count("[trainer1] epoch 1") == out.count("RPC round trips a step") == 1
    assert json.loads((tmp_path / "outputs/rpc_rnn/metrics.json").read_text())["world_size"] == 3


def test_three_terminals(free_port, tmp_path):
    """The store is the server's, who is not among the trainers; and he needs no text."""
    place = ["--world_size", 3, "--master_addr", "localhost", "--master_port", free_port]
    server = script(MAIN, *place, "--rank", 0, "--corpus", tmp_path / "not on this machine")
    with running(server, tmp_path) as ps, running(script(MAIN, *place, *SHORT, "--rank", 2), tmp_path) as other:
        result = run(script(MAIN, *place, *SHORT, "--rank", 1), tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1].startswith("loss ")
        for process in (ps, other):
            assert end(process, within_s=SLOW_START_S) == ("", "")
            assert process.returncode == 0


# --- what can go wrong


@pytest.mark.parametrize(("flags", "says"), [
    *(bad("--world_size", value, says=("--world_size", value, "at least 2")) for value in ("1", "0", "two")),
    *(bad(f"--{flag}", "0", says=(f"--{flag}", "'0'", "at least 1"))
      for flag in ("epochs", "batch_size", "bptt", "ninp", "nhid", "nlayers")),
    *(bad("--dropout", value, says=("--dropout", value, "at least 0 and at most 1")) for value in ("-0.1", "1.5")),
    *(bad("--lr", value, says=("--lr", value, "above 0")) for value in ("0", "nan")),
    bad("--optimizer", "lbfgs", says=("--optimizer", "lbfgs", "adam")),
    bad("--batch_size", "30000", says=("--batch_size 30000 must be at most 25000 for 1 trainer",)),
    bad("--batch_size", "20000", "--world_size", "3",
        says=("--batch_size 20000 must be at most 12500 for 2 trainers",)),
    bad("--corpus", "/tmp/none.txt", says=("--corpus", "/tmp/none.txt", "no such file")),
    bad("--corpus", "/", says=("--corpus / must be a file, not a folder",)),
    bad("--corpus", TEXT, "--batch_size", "2000",
        says=("--corpus", "at least 40000 characters", "--batch_size 2000 smaller")),
    bad("--resume", says=("--resume", "--checkpoint")),
    bad("--checkpoint", "/dev/null/run.pt", says=("--checkpoint", "/dev/null/run.pt", "written")),
    bad("--checkpoint", "/tmp/none/run.pt", "--resume", says=("--checkpoint", "/tmp/none/run.pt", "existing")),
    bad("--rank", "1", says=("--rank", "1", "--master_addr")),
])
def test_bad_input(flags, says, refused):
    refused(rpc_rnn.main, flags, says)


@pytest.mark.parametrize(("content", "says"), [
    (b"", "it has 0"), (b"too short", "it has 9"), (b"\x80\x81" * 5000, "this is no text"),
    (b"text\0" * 5000, "this is no text"),
])
def test_no_text(content, says, tmp_path, refused):
    path = tmp_path / "corpus"
    path.write_bytes(content)
    refused(rpc_rnn.main, ["--corpus", str(path)], ["--corpus", str(path), "UTF-8 text of at least 400", says])


@pytest.mark.parametrize("kind", [
    "truncated", "text", "another example", "another size", "another text", "more epochs"])
def test_not_this_models_checkpoint(kind, tmp_path, refused):
    path, vocabulary = tmp_path / "run.pt", "abcdefghij"
    state = {"example": "rpc_rnn", "model": LocalRNNModel(10, 32, 64, 1).state_dict(), "epochs": [],
             "vocabulary": vocabulary if kind == "another text" else None}
    state |= {"another example": {"example": "rpc_rl"}, "more epochs": {"epochs": [{}] * 9},
              "another size": {"model": LocalRNNModel(10, 32, 65, 1).state_dict()}}.get(kind, {})
    torch.save(state, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:20_000])
    elif kind == "text":
        path.write_text("lr = 0.01\n")
    before = path.read_bytes()
    named = {"another text": "--corpus", "more epochs": "--epochs"}.get(kind, str(path))
    refused(rpc_rnn.main, ["--checkpoint", str(path), "--resume"], [named])
    assert path.read_bytes() == before


def test_benchmark(tmp_path):
    result = run(script("benchmarks/rpc_rnn.py", "--rounds", 2, "--steps", 3), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    metrics = json.loads((tmp_path / "outputs/benchmark_rpc_rnn/metrics.json").read_text())
    assert len(metrics["parts_ms"]) == 7
    assert min(*metrics["parts_ms"].values(), *metrics["ms_per_step"].values()) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: both processes share it")
def test_check_on_a_gpu(tmp_path):
    assert rpc_rnn.main(["--check", "--device", "cuda", "--output_dir", str(tmp_path)])
