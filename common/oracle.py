"""Compare the numbers of a run with those of a single process, and print the findings.

    findings = Comparison("3 processes", "one process")
    findings.equal("actions", recorded["actions"], alone["actions"], "same seeds, same draws")
    findings.close("weights", recorded["weights"], alone["weights"], 1e-6, "float32 rounding")
    findings.holds("updates", arrived == sent, f"{sent} were sent and {arrived} arrived")
    return verdict(findings.as_dict())          # prints a line for each; status 1 if one fails

It also holds what several checks share: float64, fingerprints of images, tensors as one vector,
the steps of all ranks side by side, random numbers of each rank.
"""

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from common import report
from common.data import load_data

import torch
from torch.utils.data import TensorDataset


class Comparison:
    """The findings of a check; as a dict they travel from the rank that compares.

    Args:
        run: What is checked, in words: "3 processes".
        oracle: What it is compared with, in words: "one process".
    """

    def __init__(self, run: str, oracle: str = "one process") -> None:
        self.run, self.oracle = run, oracle
        self.findings = []

    def equal(self, what: str, run: Iterable, oracle: Iterable, because: str,
              unit: str = "step") -> float:
        """Require that every number of `run` is bitwise identical; see `close`."""
        return self.close(what, run, oracle, 0.0, because, unit)

    def close(self, what: str, run: Iterable, oracle: Iterable, tolerance: float, because: str,
              unit: str = "step", scale_at_least: float = 0.0) -> float:
        """Compare every number of `run` with that of `oracle`.

        Args:
            what: Name of the numbers.
            run, oracle: One entry for each step, in order: a number, a tensor, lists and dicts.
            tolerance: Largest allowed difference, as a fraction of the oracle's largest number of
                the same name.
            because: Reason for the tolerance, in a few words.
            unit: What an entry is: "step", "episode".
            scale_at_least: Smallest value for that largest number, so that noise is not compared
                with noise.

        Returns:
            The largest difference as such a fraction; infinite if shapes differ, NaN if one side
            is not a number.
        """
        run = [dict(_leaves(step)) for step in run]
        oracle = [dict(_leaves(step)) for step in oracle]
        count = sum(leaf.numel() for step in oracle for leaf in step.values())
        largest, where, pair = _difference(run, oracle, tolerance, unit, scale_at_least)
        allowed = f"at most {tolerance:.0e} of the largest" if tolerance else "bitwise identical"
        extent = f"{count} numbers of {_counted(len(oracle), unit)}"
        if where is None and count == 0:
            where = "nothing was recorded"
        if where is None:
            found = f"differ by {largest:.1e}, {allowed}" if tolerance else allowed
            return self._add(what, largest, True, f"{extent}: {found} ({because})")
        says = (f"{where} ({extent}; the largest difference is {largest:.1e}; "
                f"expected: {allowed}, {because})")
        return self._add(what, largest, False, says, pair)

    def holds(self, what: str, condition: object, says: str) -> bool:
        """Require a property that is no comparison of numbers; `says`: what was found, in words."""
        self._add(what, 0.0 if condition else float("inf"), bool(condition), says)
        return bool(condition)

    def as_dict(self) -> dict:
        """Return everything in a form that JSON can hold."""
        return {"run": self.run, "oracle": self.oracle, "findings": self.findings}

    def _add(self, what: str, difference: float, holds: bool, says: str,
             pair: dict | None = None) -> float:
        says = says.replace("{run}", self.run).replace("{oracle}", self.oracle)
        self.findings.append({"what": what, "difference": difference, "holds": holds, "says": says,
                              **(pair or {})})
        return difference


def hold_masks(findings: Comparison, masks: torch.Tensor, units: str) -> None:
    """Require that dropout masks are random, at a rate of 0.6.

    The order of the requests is chance, so single masks cannot be compared. Two random choices in
    a billion are further from that rate.

    Args:
        findings: Receives the findings.
        masks: Masks (n, 128).
        units: What has one mask each: "steps".
    """
    share, bound = (masks > 0).double().mean().item(), 6 * math.sqrt(0.24 / masks.numel())
    findings.holds("dropout rate", abs(share - 0.4) < bound,
                   f"{share:.3f} of {masks.numel()} hidden units were kept, 0.4 +- {bound:.3f}")
    different = len(masks.unique(dim=0))
    findings.holds("dropout masks", different == len(masks),
                   f"{different} of {len(masks)} {units} had their own mask")


class CheckFailedError(SystemExit):
    """Ends a failed `--check` with status 1; `findings` are those that do not hold.

    A finding is a dict: `what` is its name, `says` what was found in words. A comparison of numbers
    also has the first pair that differs, `run` and `oracle`, and its `entry`.
    """

    def __init__(self, findings: list[dict]) -> None:
        super().__init__(1)
        self.findings = findings


def verdict(compared: dict | None) -> dict[str, float] | None:
    """Print a line for each finding and one for all.

    Args:
        compared: Result of `Comparison.as_dict`; None on a rank that does not report.

    Returns:
        `{what: difference}`.

    Raises:
        CheckFailedError: A comparison does not hold. (A `SystemExit` with status 1.)
    """
    if compared is None:
        return None
    findings = compared["findings"]
    for finding in findings:
        holds = "ok" if finding["holds"] else "FAIL"
        report.log("check", f"{finding['what']}: {finding['says']}: {holds}")
    failed = [finding for finding in findings if not finding["holds"]]
    pair = f"{compared['run']} against {compared['oracle']}"
    if failed or not findings:
        print(f"check FAILED: {pair}: {len(failed)} of {len(findings)} comparisons do not hold: "
              f"{', '.join(finding['what'] for finding in failed)}")
        raise CheckFailedError(failed)
    print(f"check passed: {pair}: {len(findings)} of {len(findings)} comparisons hold")
    return {finding["what"]: finding["difference"] for finding in findings}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the type of new tensors; in float64, a mistake cannot be taken for rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load_float64(args: Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Load 467 training images and 359 test images, in float64.

    Both numbers are primes: no number of ranks or steps divides them, so shares are unequal. Padded
    for two or three ranks, 467 images still make a smaller last batch.
    """
    train, test = (half.tensors for half in load_data(args))
    return (TensorDataset(train[0][:467].double(), train[1][:467]),
            TensorDataset(test[0][:359].double(), test[1][:359]))


class Draws:
    """The sequence of random numbers of one of several processes."""

    def __init__(self, device: torch.device) -> None:
        self.gpus, self.states = [device] if device.type == "cuda" else [], None

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this sequence inside the block; outside, nothing changes."""
        with torch.random.fork_rng(self.gpus):
            if self.states:
                torch.set_rng_state(self.states[0])
                for gpu, state in zip(self.gpus, self.states[1:], strict=True):
                    torch.cuda.set_rng_state(state, gpu)
            yield
            self.states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.gpus)]

    def seed(self, seed: int) -> None:
        """Start the sequence of a process that called `torch.manual_seed(seed)`."""
        with self.drawing():
            torch.manual_seed(seed)


def fingerprints(images: torch.Tensor) -> torch.Tensor:
    """Compute a number (n,) for each image (n, ...) that identifies it."""
    pixels = images.detach().flatten(1).cpu()
    return pixels @ torch.linspace(1, 2, pixels.shape[1], dtype=pixels.dtype).cos()


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Copy tensors of any shapes to one vector on the CPU."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


def by_rank(recorded: list[list[dict]], name: str) -> list[dict]:
    """Return what all ranks recorded by a name: for each step, `{"rank 0": ..., "rank 1": ...}`.

    Args:
        recorded: For each rank its steps, in order, each a dict. An empty list replaces a step that
            one rank lacks, or a name that it lacks.
        name: Key in those dicts.
    """
    return [{f"rank {rank}": step.get(name, []) for rank, step in enumerate(of_all)}
            for of_all in zip_longest(*recorded, fillvalue={})]


def _leaves(entry: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested lists and dicts, named `observer1 weight`."""
    if isinstance(entry, dict):
        for key, value in entry.items():
            yield from _leaves(value, f"{name} {key}".strip())
        return
    try:
        tensor = torch.as_tensor(entry, dtype=torch.float64, device="cpu").detach()
    except (ValueError, TypeError):  # lists of several lengths, of dicts or tensors
        for index, value in enumerate(entry):
            yield from _leaves(value, f"{name} {index}".strip())
    else:
        yield name, tensor


def _difference(run: list[dict], oracle: list[dict], tolerance: float, unit: str,
                scale_at_least: float) -> tuple[float, str | None, dict]:
    """Return the largest difference, the place of the first large one in words, and that pair."""
    largest, where, first_pair = 0.0, None, {}
    scales = {}
    for step in oracle:
        for name, numbers in step.items():
            finite = numbers[numbers.isfinite()].abs()  # an infinite scale hides all else
            size = finite.max().item() if finite.numel() else 0.0
            scales[name] = max(scales.get(name, scale_at_least), size)
    first = 0 if unit == "rank" else 1
    for index, (ours, theirs) in enumerate(zip(run, oracle, strict=False), start=first):
        at = f"first differs at {unit} {index}"
        if ours.keys() != theirs.keys():
            odd = ", ".join(sorted(ours.keys() ^ theirs.keys())[:3])
            return float("inf"), where or f"{at}: {odd} on one side only", {}
        for name, numbers in theirs.items():
            if ours[name].shape != numbers.shape:
                shapes = f"{list(ours[name].shape)} in {{run}}, {list(numbers.shape)} in {{oracle}}"
                return float("inf"), where or f"{at}{name and f', {name}'}: shape {shapes}", {}
            off = (ours[name] - numbers).abs() / (scales[name] or 1.0)
            off = torch.where(ours[name] == numbers, 0.0, off)  # infinities alike
            worst = off.max().item() if off.numel() else 0.0
            largest = worst if worst != worst else max(largest, worst)
            if where is None and not worst <= tolerance:
                place = [int(i) for i in (~(off <= tolerance)).nonzero()[0]]
                entry = f"{name}{place or ''}"
                pair = ours[name][tuple(place)].item(), numbers[tuple(place)].item()
                where = (f"{at}{entry and f', {entry}'}: {pair[0]:.7g} in {{run}}, "
                         f"{pair[1]:.7g} in {{oracle}}")
                first_pair = {"entry": entry, "run": pair[0], "oracle": pair[1]}
    if where is None and len(run) != len(oracle):
        largest = float("inf")
        counts = _counted(len(run), unit), _counted(len(oracle), unit)
        where = "{} in {{run}}, {} in {{oracle}}".format(*counts)
    return largest, where, first_pair


def _counted(number: int, unit: str) -> str:
    plural = f"{unit}es" if unit.endswith(("s", "batch")) else f"{unit}s"
    return f"{number} {unit if number == 1 else plural}"
