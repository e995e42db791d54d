"""What is learned: a synthetic Markov language of known entropy, or any text. No RPC here."""

import math
from argparse import Namespace
from bisect import bisect
from collections.abc import Iterator
from typing import NamedTuple

from common import cli
from common.cli import given, refuse

import numpy as np
import torch

NTOKEN = 10  # of the synthetic language; the tutorial's number
CONCENTRATION = 0.2  # the smaller, the fewer tokens are likely to come next
TRAIN_TOKENS, VAL_TOKENS = 200_000, 50_000
VAL_SHARE = 0.1  # of a text
TRAINER = 1  # the rank that reads it, and that prints under torchrun what is refused


class Language(NamedTuple):
    """Holds tokens, two LongTensors of one dimension, and what is known of their source."""

    train: torch.Tensor
    val: torch.Tensor
    ntoken: int
    entropy_floor: float | None  # the best possible loss, nats per token; None: nobody knows it
    floor_without_memory: float | None  # the same for a model that sees one token at a time
    vocabulary: str | None  # character i is token i


class MarkovChain:
    """Makes a language in which the last two tokens decide how likely each next one is.

    That is enough to ask for a model that remembers.

    Args:
        seed: of the probabilities.
        ntoken: how many tokens there are.
    """

    def __init__(self, seed: int, ntoken: int = NTOKEN) -> None:
        # next_token[a, b, c]: how likely c is after a, b
        self.next_token = np.random.default_rng(seed).dirichlet(
            [CONCENTRATION] * ntoken, size=(ntoken, ntoken))

    def pairs(self) -> np.ndarray:
        """Return the share of each pair of tokens in the long run: (ntoken, ntoken), in all 1."""
        n = len(self.next_token)
        # From pair (a, b) the chain goes to pair (b, c). In the long run, a step changes nothing:
        # pairs @ step = pairs.
        step = np.einsum("abc,bd->abdc", self.next_token, np.eye(n)).reshape(n * n, n * n)
        equations = np.vstack([step.T - np.eye(n * n), np.ones(n * n)])
        pairs, *_ = np.linalg.lstsq(equations, np.append(np.zeros(n * n), 1), rcond=None)
        return pairs.reshape(n, n)

    def entropy_rate(self) -> float:
        """Return the entropy of a token given all before it, in nats: no loss can be smaller."""
        return float((self.pairs() * entropy(self.next_token)).sum())

    def entropy_without_memory(self) -> float:
        """Return the entropy of a token given only the one before it, in nats."""
        pairs = self.pairs()
        return float(entropy(pairs.reshape(-1)) - entropy(pairs.sum(axis=0)))

    def draw(self, n_tokens: int, seed: int) -> torch.Tensor:
        """Draw tokens of the language: a LongTensor (n_tokens,)."""
        cumulated = self.next_token.cumsum(axis=-1)
        cumulated[..., -1] = 1  # rounding may have left it a little below
        cumulated, tokens, a, b = cumulated.tolist(), [], 0, 0
        for number in np.random.default_rng(seed).random(n_tokens).tolist():
            a, b = b, bisect(cumulated[a][b], number)
            tokens.append(b)
        return torch.tensor(tokens)


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy in nats, over the last axis."""
    return -(probabilities * np.log(np.maximum(probabilities, np.finfo(float).tiny))).sum(axis=-1)


def load_language(args: Namespace) -> Language:
    """Load the language of `--corpus`, or make the synthetic one.

    Raises:
        OSError, UnicodeDecodeError, ValueError: if the corpus cannot be read, or is no text.
    """
    if args.corpus is None:
        chain = MarkovChain(args.seed)
        train = chain.draw(TRAIN_TOKENS, args.seed + 1)
        val = chain.draw(VAL_TOKENS, args.seed + 2)
        return Language(train, val, NTOKEN, chain.entropy_rate(), chain.entropy_without_memory(),
                        vocabulary=None)
    text = args.corpus.read_text(encoding="utf-8")
    if "\0" in text:
        raise ValueError("a zero byte: binary")
    vocabulary = "".join(sorted(set(text)))
    token_of = {character: token for token, character in enumerate(vocabulary)}
    tokens = torch.tensor([token_of[character] for character in text], dtype=torch.int64)
    train, val = tokens.tensor_split([round(len(tokens) * (1 - VAL_SHARE))])
    return Language(train, val, len(vocabulary), None, None, vocabulary)


def columns(tokens: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Cut tokens into columns that are read side by side.

    Args:
        tokens: one after the other.
        batch_size: how many columns.

    Returns:
        A LongTensor (length, batch_size). The last few tokens, which fill no row, are left out.
    """
    length = len(tokens) // batch_size
    return tokens[: length * batch_size].view(batch_size, length).t().contiguous()


def get_next_batch(table: torch.Tensor, bptt: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets, each (at most `bptt`, batch_size).

    The target of a token is the next one of its column.
    """
    # Tutorial: both were uninitialised memory.
    for start in range(0, len(table) - 1, bptt):
        end = min(start + bptt, len(table) - 1)
        yield table[start:end], table[start + 1 : end + 1]


def require_inputs(args: Namespace) -> Language | None:
    """Refuse, before any process starts, a corpus and sizes that do not fit.

    Returns:
        The language; None where only the server starts, which needs none of it.

    Raises:
        SystemExit: 2 after one line.
    """
    if not cli.starts_rank(args, 1):
        return None
    language = require_language(args)
    require_model(language, args)
    return language


def require_language(args: Namespace) -> Language:
    """Return the language; refuse one that cannot be read or does not fill all columns."""
    # An input and a target in each column, also of the validation part.
    fewest = math.ceil(2 * args.batch_size / VAL_SHARE)
    wanted = f"--corpus {args.corpus} must be a UTF-8 text of at least {fewest} characters"
    if args.corpus is not None:
        if not cli.require_file("--corpus", args.corpus, TRAINER):
            refuse(f"{wanted} (no such file)", TRAINER)
        # A character has 4 bytes at most, and in the trainer it becomes a token of 8.
        cli.require_memory(args, ["corpus"], 8 * args.corpus.stat().st_size // 4, TRAINER)
    try:
        language = load_language(args)
    except (OSError, ValueError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) else "this is no text"
        refuse(f"{wanted} ({reason})", TRAINER)
    if len(language.val) < 2 * args.batch_size:
        if args.corpus is None:
            refuse(f"{given(args, 'batch_size')} must be at most {len(language.val) // 2}", TRAINER)
        refuse(f"{wanted}, or {given(args, 'batch_size')} smaller: it has "
               f"{len(language.train) + len(language.val)}", TRAINER)
    return language


def require_model(language: Language, args: Namespace) -> None:
    """Refuse sizes with which the model does not fit into this machine."""
    weights = 2 if cli.on_cpu(args) else 1  # on a CPU, with their gradients
    tables = language.ntoken * (args.ninp + args.nhid)
    deeper = (args.nlayers - 1) * (2 * args.nhid + 2)
    lstm = 4 * args.nhid * (args.ninp + args.nhid + 2 + deeper)
    # Four gates and a state of each token, which the backward pass needs.
    rows = min(args.bptt, len(language.train) // args.batch_size - 1)
    states = 5 * rows * args.batch_size * args.nhid * args.nlayers if cli.on_cpu(args) else 0
    # Besides, PyTorch needs hundreds of bytes for each of the four parameters of a layer.
    of_trainer = 4 * (weights * lstm + states) + 1000 * args.nlayers
    of_server = 4 * weights * tables if 0 in cli.ranks_here(args) else 0
    cli.require_memory(args, ["ninp", "nhid", "nlayers"],
                       of_server + of_trainer, TRAINER)
