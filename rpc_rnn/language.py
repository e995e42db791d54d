"""What the lesson learns to predict: a made language whose entropy is known, or any text. No RPC here."""

from bisect import bisect
from typing import NamedTuple

import numpy as np
import torch

NTOKEN = 10  # of the made language; the tutorial's number
CONCENTRATION = 0.2  # the smaller, the fewer tokens are likely to come next
TRAIN_TOKENS, VAL_TOKENS = 200_000, 50_000
VAL_SHARE = 0.1  # of a text


class Language(NamedTuple):
    """Tokens to learn from: two LongTensors of one dimension, and what is known of their source."""

    train: torch.Tensor
    val: torch.Tensor
    ntoken: int
    entropy_floor: float | None  # nats per token, the best possible loss; None where nobody knows it
    floor_without_memory: float | None  # the same for a model that sees one token at a time
    vocabulary: str | None  # character i is token i


class MarkovChain:
    """A language in which the last two tokens decide how likely each next one is: enough that an LSTM must remember.

    Args:
        seed: of the probabilities.
        ntoken: how many tokens there are.
    """

    def __init__(self, seed, ntoken=NTOKEN):
        # next_token[a, b, c]: how likely c is after a, b
        self.next_token = np.random.default_rng(seed).dirichlet([CONCENTRATION] * ntoken, size=(ntoken, ntoken))

    def pairs(self):
        """How often each pair of tokens comes in the long run: shape (ntoken, ntoken), in all 1."""
        n = len(self.next_token)
        # From pair (a, b) the chain goes to pair (b, c). In the long run, a step changes nothing: pairs @ step = pairs.
        step = np.einsum("abc,bd->abdc", self.next_token, np.eye(n)).reshape(n * n, n * n)
        equations = np.vstack([step.T - np.eye(n * n), np.ones(n * n)])
        return np.linalg.lstsq(equations, np.append(np.zeros(n * n), 1), rcond=None)[0].reshape(n, n)

    def entropy_rate(self):
        """The entropy of the next token given all before it, in nats, exactly: no model can have a smaller loss."""
        return float((self.pairs() * entropy(self.next_token)).sum())

    def entropy_without_memory(self):
        """The entropy of the next token given only the last one."""
        pairs = self.pairs()
        return float(entropy(pairs.reshape(-1)) - entropy(pairs.sum(axis=0)))

    def draw(self, n_tokens, seed):
        """A sample of the language."""
        cumulated = self.next_token.cumsum(axis=-1)
        cumulated[..., -1] = 1  # rounding may have left it a little below
        cumulated, tokens, a, b = cumulated.tolist(), [], 0, 0
        for number in np.random.default_rng(seed).random(n_tokens).tolist():
            a, b = b, bisect(cumulated[a][b], number)
            tokens.append(b)
        return torch.tensor(tokens)


def entropy(probabilities):
    """In nats, over the last axis."""
    return -(probabilities * np.log(np.maximum(probabilities, np.finfo(float).tiny))).sum(axis=-1)


def load_language(args):
    """The language of `--corpus`, or the made one, the same on every trainer.

    Raises:
        OSError, UnicodeDecodeError, ValueError: if the corpus cannot be read, or is no text.
    """
    if args.corpus is None:
        chain = MarkovChain(args.seed)
        train, val = chain.draw(TRAIN_TOKENS, args.seed + 1), chain.draw(VAL_TOKENS, args.seed + 2)
        return Language(train, val, NTOKEN, chain.entropy_rate(), chain.entropy_without_memory(), None)
    text = args.corpus.read_text(encoding="utf-8")
    if "\0" in text:
        raise ValueError("a zero byte: binary")
    vocabulary = "".join(sorted(set(text)))
    token_of = {character: token for token, character in enumerate(vocabulary)}
    tokens = torch.tensor([token_of[character] for character in text], dtype=torch.int64)
    train, val = tokens.tensor_split([round(len(tokens) * (1 - VAL_SHARE))])
    return Language(train, val, len(vocabulary), None, None, vocabulary)


def columns(tokens, batch_size, trainer, n_trainers):
    """Cut the tokens into columns that are read side by side, `batch_size` for each trainer; those of one trainer.

    Returns:
        A LongTensor (length, batch_size). The last few tokens, which fill no row of all columns, are left out.
    """
    n_columns = batch_size * n_trainers
    length = len(tokens) // n_columns
    table = tokens[: length * n_columns].view(n_columns, length)
    return table[trainer * batch_size : (trainer + 1) * batch_size].t().contiguous()


def get_next_batch(table, bptt):
    """Yield inputs and targets, each (at most `bptt`, batch_size): the target of a token is the token below it."""
    for start in range(0, len(table) - 1, bptt):
        end = min(start + bptt, len(table) - 1)
        yield table[start:end], table[start + 1 : end + 1]
