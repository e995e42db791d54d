"""What `--check` holds against what: each of these adds its lines to a `Comparison`."""

import itertools
import math
from argparse import Namespace

import torch
from common.oracle import Comparison
from torch import nn

from rpc_rnn.data import Language, MarkovChain

TOLERANCE = 1e-9
BECAUSE = "float64, whose sums may come in another order"
PARTS = ("table", "LSTM", "decoder")
OfParts = dict[str, dict[str, torch.Tensor]]  # of each of them, tensors by name
# 2 forward, 3 backward, the step, the context's end; with several trainers 2 to average. In
# prefetch.py, the step brings and takes the embeddings.
ROUND_TRIPS = {"main": 7, "several_trainers": 9, "prefetch": 5}


def hold_sizes(found: Comparison, weights: OfParts, expected: OfParts) -> bool:
    """Hold the parameters of all parts against the flags; return whether they are those."""
    ours, theirs = ({f"{part} {name}": list(tensor.shape) for part, tensors in parts.items()
                     for name, tensor in tensors.items()} for parts in (weights, expected))
    says = f"{len(ours)} tensors of the sizes that the flags say"
    if ours != theirs:
        says = f"{ours} in {{run}}, {theirs} in {{oracle}}"
    return found.holds("sizes", ours == theirs, says)


def hold_first_weights(found: Comparison, recordings: list[dict], names: list[str],
                       args: Namespace) -> None:
    """Hold the weights before the first step: by the seed, of independent draws, alike on all."""
    weights = recordings[0]["initial"]
    ntoken = len(weights["decoder"]["decoder.bias"])
    torch.manual_seed(3 * args.seed + 1)
    drawn = {"LSTM": dict(nn.LSTM(args.ninp, args.nhid, args.nlayers).named_parameters()),
             "table": {"encoder.weight": uniform((ntoken, args.ninp), 3 * args.seed)},
             "decoder": {"decoder.weight": uniform((ntoken, args.nhid), 3 * args.seed + 2),
                         "decoder.bias": torch.zeros(ntoken)}}
    found.equal("first weights, drawn", [weights], [drawn],
                "the seed says them; those of table and decoder between -0.1 and 0.1", "model")
    # Scaled to -1 .. 1, the same generator gives the same numbers.
    scaled = {"table": weights["table"]["encoder.weight"] / 0.1,
              "decoder": weights["decoder"]["decoder.weight"] / 0.1,
              "LSTM": weights["LSTM"]["weight_ih_l0"] * math.sqrt(args.nhid)}
    first_8 = {part: numbers.flatten()[:8].tolist() for part, numbers in scaled.items()}
    alike = [f"{one} and {other}" for one, other in itertools.combinations(first_8, 2)
             if all(abs(a - b) < 1e-6
                    for a, b in zip(first_8[one], first_8[other], strict=False))]
    found.holds("first weights, independent", not alike,
                f"alike: {', '.join(alike)}" if alike
                else "table, LSTM and decoder have drawn other numbers")
    if len(recordings) > 1:
        replicas = {name: recording["initial"]["LSTM"]
                    for name, recording in zip(names, recordings, strict=True)}
        found.equal("first weights, replicas", [replicas], [dict.fromkeys(names, weights["LSTM"])],
                    "DDP sends those of the first trainer to all", "model")


def uniform(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Draw numbers between -0.1 and 0.1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)


def hold_training(found: Comparison, recordings: list[dict], names: list[str],
                  epochs: list[list[dict]]) -> None:
    """Hold every step: what it reads, its losses, the gradients and weights that come of it."""
    steps, expected = recorded(recordings, names, training=True), sum(epochs, [])
    hold_reading(found, "training", steps, expected, "step")
    history = sum(entry["with history"] for step in steps for entry in step.values())
    found.holds("training, states without history", history == 0,
                f"{history} of {len(steps) * len(names)} states carry the graph of the step before")
    for what, title in (("gradients", "gradients in the context"),
                        ("weights", "weights after each step")):
        for part in PARTS:
            owners = names if part == "LSTM" else names[:1]  # only the first one fetches the tables
            found.close(f"{title}, {part}",
                        [{name: step[name].get(what, {}).get(part, {}) for name in owners}
                         for step in steps],
                        [{name: step[what][part] for name in owners} for step in expected],
                        TOLERANCE, BECAUSE)


def hold_validation(found: Comparison, recordings: list[dict], names: list[str],
                    passes: list[list[dict]]) -> None:
    """Hold every piece of validation text."""
    hold_reading(found, "validation", recorded(recordings, names, training=False), sum(passes, []),
                 "piece")


def recorded(recordings: list[dict], names: list[str], training: bool) -> list[dict[str, dict]]:
    """Return the entry of each trainer, for each finished step or piece of validation text."""
    of_each = [[entry for entry in recording["entries"]
                if "loss" in entry and entry["training"] == training] for recording in recordings]
    return [dict(zip(names, entries, strict=True)) for entries in zip(*of_each, strict=False)]


def hold_reading(found: Comparison, title: str, pieces: list[dict[str, dict]],
                 expected: list[dict], unit: str) -> None:
    """Hold the tokens of each piece of text, the state before it, and its loss."""
    def ours(key):
        return [{name: entry.get(key, []) for name, entry in piece.items()} for piece in pieces]

    def theirs(key):
        return [piece[key] for piece in expected]

    for key, tokens in (("data", "tokens"), ("target", "targets")):
        found.equal(f"{title}, {tokens}", ours(key), theirs(key),
                    "the text in columns side by side, each target the next token", unit)
    for key, numbers in (("hidden", "state carried over"), ("loss", "loss")):
        found.close(f"{title}, {numbers}", ours(key), theirs(key), TOLERANCE, BECAUSE, unit)


def hold_speed(found: Comparison, recording: dict, metrics: dict, n_epochs: int,
               args: Namespace) -> None:
    """Hold the reported steps per second, by the clock of a trainer, and its round trips."""
    spans = [entry["span"] for entry in recording["entries"] if "span" in entry]
    of_epoch = max(1, len(spans) // n_epochs)
    epochs = [spans[i : i + of_epoch] for i in range(0, len(spans), of_epoch)]
    seconds = sum(epoch[-1][1] - epoch[0][0] for epoch in epochs)
    ratio = (metrics["steps_per_s"] or 0.0) * seconds / len(spans) if spans else 0.0
    found.holds("metrics, steps per second", 0.5 < ratio < 1.01,
                f"{ratio:.2f} of those between the first and the last step of each epoch, 0.5 to "
                "1.01 expected: no validation, no start")
    counted = metrics["rpc_round_trips_per_step"]
    expected = ROUND_TRIPS[args.program.split(".")[1]]
    found.holds("metrics, round trips", counted == expected,
                f"{counted} RPCs of a step, {expected} expected")


def hold_metrics(found: Comparison, metrics: dict, alone: dict, language: Language,
                 args: Namespace) -> None:
    """Hold what else the run reports."""
    expected, once = alone["metrics"], ("initial_val_loss", "perplexity")
    found.close("metrics, losses of the epochs", metrics["epochs"], expected["epochs"], TOLERANCE,
                BECAUSE, "epoch")
    found.close("metrics, loss before and perplexity after", [{key: metrics[key] for key in once}],
                [{key: expected[key] for key in once}], TOLERANCE, BECAUSE, "run")
    if args.corpus:
        hold_text(found, metrics["sample"], alone["sample"], language, args)
    else:
        hold_floors(found, metrics, language, args)


def hold_text(found: Comparison, sample: str, expected: list[int], language: Language,
              args: Namespace) -> None:
    """Hold the corpus, and a text from the model."""
    tokens = [*language.train.tolist(), *language.val.tolist()]
    text = "".join(language.vocabulary[token] for token in tokens)
    found.holds("text", text == args.corpus.read_text(encoding="utf-8"),
                f"{len(text)} characters for training and validation, the corpus in order, each "
                "once")
    found.equal("sample", [[language.vocabulary.find(character) for character in sample]],
                [expected], "drawn from seeded generators", "text")


def hold_floors(found: Comparison, metrics: dict, language: Language, args: Namespace) -> None:
    """Hold the entropies of the synthetic language against its tokens."""
    train, chain = language.train, torch.from_numpy(MarkovChain(args.seed).next_token)
    surprise = -chain[train[:-2], train[1:-1], train[2:]].log().mean().item()
    pairs = torch.zeros(10, 10).index_put((train[:-1], train[1:]), torch.tensor(1.0),
                                          accumulate=True) / (len(train) - 1)
    with_one = (torch.special.entr(pairs).sum() - torch.special.entr(pairs.sum(dim=1)).sum()).item()
    # The standard error of such a mean over 200,000 tokens is 0.2%.
    for key, counted, how in (
            ("entropy_floor", surprise, "the chain's own surprise"),
            ("floor_without_memory", with_one, "the entropy of a token after one token")):
        found.holds(f"metrics, {key}", abs(metrics[key] / counted - 1) < 0.02,
                    f"{metrics[key]:.4f} nats; {how}, counted in {len(train)} tokens, is "
                    f"{counted:.4f}; 2% is allowed, 10 standard errors")
    n = min(len(language.val), len(train))
    same = (language.val[:n] == train[:n]).double().mean().item()
    found.holds("validation tokens", same < 0.5,
                f"{same:.0%} of them stand at the same place of the training's")
