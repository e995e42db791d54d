"""Where all numbers of a run are right: does it cost more than it has to?

An oracle may hold what a rank sends and what it holds against a formula, too, and finds

    zero2, bytes sent: first differs at rank 0: 3.3e+07 in 5 processes, 1.9e+07 in one process (...

An answer that costs more does not count as solved: a loop that sends each tensor to everyone would
be right, too. One that costs less in one of these, and nothing more in another, is as good.
"""

import re

HELD = re.compile(r"(weights|gradients|state) held( at most)?")
COST = re.compile(rf"\w+, (calls|bytes sent|{HELD.pattern}|in flight|bubble): ")
NUMBERS = re.compile(r"differs at rank \d+(?:, (\w+))?: (\S+) in [^,]+, (\S+) in ")
WHAT = {"weights": {"ja": "重み", "en": "weights"}, "gradients": {"ja": "勾配", "en": "gradients"},
        "state": {"ja": "オプティマイザーの状態", "en": "the optimizer's state"}}
MB = 1e6


def waste_in(failed: list[str]) -> list[tuple[str, dict]] | None:
    """Return what costs too much, as (key in words.toml, its values).

    Args:
        failed: the findings that do not hold.

    Returns:
        None if one of them is no cost: the numbers are wrong. An empty list if nothing costs more.
    """
    wasted = []
    for finding in failed:
        cost, numbers = COST.match(finding), NUMBERS.search(finding)
        if not cost or not numbers and cost[1] != "calls":
            return None
        if numbers:  # else, other collectives: whether they are worse, their bytes tell
            name, ours, theirs = numbers[1], float(numbers[2]), float(numbers[3])
            if cost[1] == "bytes sent" and ours < theirs:
                return None  # by something that is not counted
            if ours > theirs:
                wasted.append(_in_words(cost[1], name, ours, theirs))
    return wasted


def _in_words(cost: str, name: str | None, ours: float, theirs: float) -> tuple[str, dict]:
    if held := HELD.match(cost):
        key = "cost_held_at_most" if held[2] else "cost_held"
        return key, {"what": WHAT[held[1]], **_megabytes(ours, theirs)}
    if cost == "bytes sent":
        return "cost_sent", _megabytes(ours, theirs)
    return f"cost_{cost.replace(' ', '_')}", {"name": name, "ours": ours, "theirs": theirs}


def _megabytes(ours: float, theirs: float) -> dict[str, str]:
    """Write two numbers of bytes as megabytes, with as many digits as tell them apart."""
    digits = next(number for number in range(2, 9)
                  if f"{ours / MB:.{number}f}" != f"{theirs / MB:.{number}f}")
    return {"ours": f"{ours / MB:.{digits}f}", "theirs": f"{theirs / MB:.{digits}f}"}
