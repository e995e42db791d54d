"""The data: a synthetic Markov language of known entropy, or any text. No RPC here."""

import math
import sys
from argparse import Namespace
from bisect import bisect
from collections.abc import Iterator
from typing import NamedTuple

from common import cli
from common.cli import given, refuse

import numpy as np
import torch

NTOKEN = 10  # vocabulary of the synthetic language; the tutorial's number
CONCENTRATION = 0.2  # with a smaller value, fewer tokens are likely to follow
TRAIN_TOKENS, VAL_TOKENS = 200_000, 50_000
VAL_SHARE = 0.1  # fraction of a text
TRAINER = 1  # rank that reads the text; under torchrun it prints why a text is refused
BYTES_PER_CHARACTER = 10  # of memory: 1 of the text and as bytes, 4 as UTF-32, 4 as a token


class Language(NamedTuple):
    """The tokens of a language and the facts known about their source."""

    train: torch.Tensor  # (tokens,) int32, which halves the memory of a long text
    val: torch.Tensor
    ntoken: int  # size of the vocabulary
    entropy_floor: float | None  # lowest possible loss in nats per token; None for a text
    floor_without_memory: float | None  # the same for a model that sees one token at a time
    vocabulary: str | None  # character i is token i; None for the synthetic language


class MarkovChain:
    """A language in which the last two tokens decide how likely each next token is.

    A model therefore needs memory to predict it well.

    Args:
        seed: Seed for the probabilities.
        ntoken: Size of the vocabulary.
    """

    def __init__(self, seed: int, ntoken: int = NTOKEN) -> None:
        # next_token[a, b, c] is the probability of c after a, b.
        self.next_token = np.random.default_rng(seed).dirichlet(
            [CONCENTRATION] * ntoken, size=(ntoken, ntoken))

    def pairs(self) -> np.ndarray:
        """Return the long-run frequency of each pair of tokens: (ntoken, ntoken), sum 1."""
        n = len(self.next_token)
        # The chain moves from pair (a, b) to pair (b, c). In the long run, a step leaves all
        # frequencies as they are: pairs @ step = pairs.
        step = np.einsum("abc,bd->abdc", self.next_token, np.eye(n)).reshape(n * n, n * n)
        equations = np.vstack([step.T - np.eye(n * n), np.ones(n * n)])
        pairs, *_ = np.linalg.lstsq(equations, np.append(np.zeros(n * n), 1), rcond=None)
        return pairs.reshape(n, n)

    def entropy_rate(self) -> float:
        """Return the entropy of a token given all earlier tokens, in nats: the lowest loss."""
        return float((self.pairs() * entropy(self.next_token)).sum())

    def entropy_without_memory(self) -> float:
        """Return the entropy of a token given only the token before it, in nats."""
        pairs = self.pairs()
        return float(entropy(pairs.reshape(-1)) - entropy(pairs.sum(axis=0)))

    def draw(self, n_tokens: int, seed: int) -> torch.Tensor:
        """Draw tokens of the language: (n_tokens,) int32."""
        cumulated = self.next_token.cumsum(axis=-1)
        cumulated[..., -1] = 1  # rounding may have left this sum a little below 1
        cumulated, tokens, a, b = cumulated.tolist(), [], 0, 0
        for number in np.random.default_rng(seed).random(n_tokens).tolist():
            a, b = b, bisect(cumulated[a][b], number)
            tokens.append(b)
        return torch.tensor(tokens, dtype=torch.int32)


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy over the last axis, in nats."""
    return -(probabilities * np.log(np.maximum(probabilities, np.finfo(float).tiny))).sum(axis=-1)


def load_language(args: Namespace) -> Language:
    """Load the language of `--corpus`, or create the synthetic language.

    Raises:
        OSError: The corpus cannot be read.
        ValueError: The corpus is no text.
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
    # A Python list of the tokens would take eight times as much memory as these arrays.
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    occurs = np.zeros(sys.maxunicode + 1, bool)
    occurs[codes] = True
    token_of = occurs.cumsum(dtype=np.int32) - 1  # tokens in the order of the characters' codes
    tokens = torch.from_numpy(token_of[codes])
    train, val = tokens.tensor_split([round(len(tokens) * (1 - VAL_SHARE))])
    vocabulary = "".join(map(chr, occurs.nonzero()[0]))
    return Language(train, val, len(vocabulary), None, None, vocabulary)


def columns(tokens: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Split tokens (n,) into columns that are read side by side: (n // batch_size, batch_size).

    The last few tokens fill no row and are left out.
    """
    length = len(tokens) // batch_size
    return tokens[: length * batch_size].view(batch_size, length).t().contiguous()


def get_next_batch(table: torch.Tensor, bptt: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets, each a LongTensor (at most `bptt`, batch_size).

    The target of a token is the next token of its column.
    """
    # Tutorial: inputs and targets were uninitialized memory.
    for start in range(0, len(table) - 1, bptt):
        end = min(start + bptt, len(table) - 1)
        yield table[start:end].long(), table[start + 1 : end + 1].long()


def require_inputs(args: Namespace) -> Language | None:
    """Refuse a corpus and sizes that do not fit, before any process starts.

    Returns:
        The language; None if only the server starts here, which does not need it.

    Raises:
        SystemExit: Status 2, after one line.
    """
    if not cli.starts_rank(args, 1):
        return None
    language = require_language(args)
    require_model(language, args)
    return language


def require_language(args: Namespace) -> Language:
    """Return the language; refuse a corpus that is unreadable or does not fill all columns."""
    # Each column needs an input and a target, also in the validation part.
    fewest = math.ceil(2 * args.batch_size / VAL_SHARE)
    wanted = f"--corpus {args.corpus} must be a UTF-8 text of at least {fewest} characters"
    if args.corpus is not None:
        if not cli.require_file("--corpus", args.corpus, TRAINER):
            refuse(f"{wanted} (no such file)", TRAINER)
        # A file has at most one character per byte.
        needed = BYTES_PER_CHARACTER * args.corpus.stat().st_size
        cli.require_memory(args, ["corpus"], needed, TRAINER)
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
    """Refuse sizes of a model that does not fit into this machine."""
    weights = 2 if cli.on_cpu(args) else 1  # on a CPU, main memory holds their gradients too
    tables = language.ntoken * (args.ninp + args.nhid)
    deeper = (args.nlayers - 1) * (2 * args.nhid + 2)
    lstm = 4 * args.nhid * (args.ninp + args.nhid + 2 + deeper)
    # The backward pass needs four gates and a state of each token.
    rows = min(args.bptt, len(language.train) // args.batch_size - 1)
    states = 5 * rows * args.batch_size * args.nhid * args.nlayers if cli.on_cpu(args) else 0
    # PyTorch also needs hundreds of bytes for each of the four parameters of a layer.
    of_trainer = 4 * (weights * lstm + states) + 1000 * args.nlayers
    of_server = 4 * weights * tables if 0 in cli.ranks_here(args) else 0
    cli.require_memory(args, ["ninp", "nhid", "nlayers"],
                       of_server + of_trainer, TRAINER)
