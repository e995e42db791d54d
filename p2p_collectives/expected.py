"""The tensors of every rank before and after each operation of `main.py`, by one process."""

from math import prod


def single_process(size: int) -> dict[str, dict[str, list[list]]]:
    """Compute the tensors of `size` ranks as lists of numbers.

    Returns:
        `{demo: {operation: [[before, after] of each rank]}}`; None for undefined numbers.
    """
    ranks = range(size)
    counts = [[rank + 1] for rank in ranks]  # 1, 2, 3, ...
    tens = [[10 * rank] for rank in ranks]
    zeros = [[0] for _ in ranks]
    ones_and_twos = [[1 + rank % 2] for rank in ranks]
    everything = [10 * rank for rank in ranks]
    lists = [[10 * column + row for column in ranks] for row in ranks]
    matrix = [[10 * row + column for column in ranks] for row in ranks]
    columns = [[count, 2 * count, 3 * count] for [count] in counts]
    sum_of_columns = [[sum(numbers) for numbers in zip(*columns, strict=True)]] * size
    own_kind = [[other for other in ranks if other % 2 == rank % 2] for rank in ranks]

    def pairs(before, after):
        return [list(pair) for pair in zip(before, after, strict=True)]

    def reduced(start, operator):
        return pairs(start, [[operator([number for [number] in start])]] * size)

    return {
        "blocking": {"send, recv": pairs(zeros, counts)},  # each rank adds one
        "nonblocking": {
            "isend, irecv": pairs(zeros, [[1], [1], *zeros[2:]]),
            "batch_isend_irecv": pairs(zeros, [[size - 1], *([rank - 1] for rank in ranks[1:])])},
        "all_reduce": {
            "all_reduce in [0, 1]": pairs([[1]] * size, [[2], [2], *[[1]] * (size - 2)])},
        "collectives": {
            "broadcast": pairs([[10, 20], *[[0, 0]] * (size - 1)], [[10, 20]] * size),
            "scatter": pairs([everything, *zeros[1:]], tens),
            "gather": pairs(tens, [everything, *[None] * (size - 1)]),
            "reduce SUM": pairs(counts, [[sum(range(1, size + 1))], *[None] * (size - 1)]),
            "all_reduce SUM": reduced(counts, sum),
            "all_reduce PRODUCT": reduced(ones_and_twos, prod),
            "all_reduce MIN": reduced(counts, min),
            "all_reduce MAX": reduced(counts, max),
            "all_reduce AVG": reduced(counts, lambda numbers: sum(numbers) / size),
            "all_gather": pairs(tens, [everything] * size),
            "reduce_scatter SUM": pairs(lists,
                                        [[sum(column)] for column in zip(*lists, strict=True)]),
            "all_to_all": pairs(matrix, [[row[rank] for row in matrix] for rank in ranks])},
        "barrier": {"barrier": pairs([None] * size, [[size]] * size)},
        "groups": {
            "all_reduce in evens, odds": pairs([[rank] for rank in ranks],
                                               [[sum(kind)] for kind in own_kind]),
            "broadcast in evens, odds": pairs(tens, [[10 * kind[0]] for kind in own_kind])},
        "noncontiguous": {
            "all_reduce of a column": pairs(columns, sum_of_columns),
            "all_reduce of its copy": pairs(columns, sum_of_columns)},
    }
