"""The training text: additions, character by character, such as "17+25=42". Nothing is fetched."""

import random
from argparse import Namespace

import torch

FIRST = 32  # the first of 96 characters: the printable ones of ASCII, and the end of a line
END_OF_LINE = 95


def batch_of(step: int, args: Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the full batch of a step; it is the same on every rank, for any number of ranks.

    Args:
        step: Number of the step, from 0.
        args: Parsed flags.

    Returns:
        Tokens and the tokens that follow them, both (batch_size, seq_len).
    """
    draw = random.Random(f"{args.seed} {step}")
    rows = torch.tensor([encode(additions(draw, args.seq_len + 1)) for _ in range(args.batch_size)])
    return rows[:, :-1], rows[:, 1:]


def additions(draw: random.Random, length: int) -> str:
    """Sample `length` characters of additions, starting somewhere in the first one."""
    text, start = "", draw.randrange(6)
    while len(text) < start + length:
        first, second = draw.randrange(100), draw.randrange(100)
        text += f"{first}+{second}={first + second}\n"
    return text[start : start + length]


def encode(text: str) -> list[int]:
    """Return the number of each character."""
    return [END_OF_LINE if letter == "\n" else ord(letter) - FIRST for letter in text]
