"""What `main.py --check` holds of reading and stepping: whose turn it was, how old weights were.

Each forward's weights are looked up among those after every step, which one process has computed.
So staleness is not counted here as the server counts it, but taken from the weights themselves.
"""

import collections

from param_server import results


def compare_turns(findings, recording):
    """After the forward of a step, that step comes next."""
    events = [(what, context) for what, context in recording.events if context is not None]
    mixed = sum(first != ("forward", second[1]) or second[0] != "step"
                for first, second in zip(events[::2], events[1::2], strict=False))
    findings.holds("turns", mixed == 0, f"{len(recording.steps)} updates: between forward and "
                   f"step, another trainer came {mixed} times")


def compare_weights_read(findings, recording, alone):
    """What a forward has read are the weights after one step, between its beginning and its end.

    Which step that is, is kept in the forward, as "version"; 0 are the initial weights.
    """
    versions = [alone["initial"], *alone["weights"]]
    sizes = {name: weight.abs().max() for name, weight in versions[0].items()}
    worst, where, count = 0.0, "", 0
    for number, forward in enumerate(recording.forwards, start=1):
        last = min(forward["begun"], len(versions) - 1)
        possible = range(min(forward["ended"], last), last + 1)
        off = {version: {name: ((read - versions[version][name]).abs().max() / sizes[name]).item()
                         for name, read in forward["weights"].items()} for version in possible}
        forward["version"] = min(possible, key=lambda version: max(off[version].values()))
        name, largest = max(off[forward["version"]].items(), key=lambda pair: pair[1])
        if not largest <= 1e-9 and not where:
            where = (f"first differs at forward {number} (trainer{forward['context'] >> 48}), "
                     f"{name}: by {largest:.1e}; ")
        worst = max(worst, largest)
        count += sum(read.numel() for read in forward["weights"].values())
    findings.holds("weights read", count and not where, f"{where}{count} numbers of "
                   f"{len(recording.forwards)} forwards: differ by {worst:.1e} from those after a "
                   "step, at most 1e-09 of the largest (double precision; others are further off)")


def compare_staleness(findings, recording, args):
    """How old the weights of each gradient were; none older than K; others could go on."""
    version = {forward["context"]: forward["version"] for forward in recording.forwards}
    ages = {rank: collections.Counter() for rank in range(1, args.world_size)}
    for number, step in enumerate(recording.steps):
        ages[step["context"] >> 48][number - version.get(step["context"], 0)] += 1
    reported = results.summary(recording.metrics, args)
    of_all = [reported["staleness"]["histogram"], *(trainer["staleness"]["histogram"]
                                                    for trainer in reported["per_trainer"])]
    counted = [sum(ages.values(), collections.Counter()), *ages.values()]
    findings.equal("staleness", of_all, [{str(age): n for age, n in sorted(counts.items())}
                                         for counts in counted],
                   "as the weights that each forward read show", "histogram")
    each = [list(counts.elements()) for counts in counted]  # a number for each gradient
    findings.close("staleness, mean and largest",
                   [[of["staleness"][what] or 0 for what in ("mean", "max")]
                    for of in (reported, *reported["per_trainer"])],
                   [[sum(of) / max(1, len(of)), max(of, default=0)] for of in each], 1e-9,
                   "of all and of each", "row")
    if args.consistency != "async":
        allowed = 0 if args.consistency == "lock" else args.max_staleness
        findings.holds("bound", max(counted[0], default=0) <= allowed, f"weights of a gradient "
                       f"were at most {max(counted[0], default=0)} steps old, {allowed} allowed")
    if recording.rested:
        expected, made = recording.rested["expected"], recording.rested["made"]
        findings.holds("overlap", made >= expected, "during the first forward of trainer1, "
                       f"others made {made} steps, {expected} expected")
