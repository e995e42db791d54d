"""Mistakes in `ddp_basic/main.py` and `skew.py`."""

from tests.mutants import Mutant

MAIN, DATA, SKEW = "ddp_basic/main.py", "ddp_basic/data.py", "ddp_basic/skew.py"
LOOP = "    for step in range(1, args.steps + 1):\n"
MUTANTS = [
    Mutant("the checkpoint is never loaded", MAIN,
           "        loaded_model.load_state_dict(torch.load(path, map_location=device, weights_only=True))\n"[4:],
           "", check="checkpoint, weights"),
    Mutant("zero_grad forgotten", MAIN,
           LOOP + "        optimizer.zero_grad()\n", LOOP, check="basic, gradients"),
    Mutant("the bare model is called, not DDP", MAIN,
           LOOP + "        optimizer.zero_grad()\n        outputs = ddp_model(inputs)",
           LOOP + "        optimizer.zero_grad()\n        outputs = ddp_model.module(inputs)",
           check="basic, gradients"),
    Mutant("all ranks have the same samples", DATA, "1000 * seed + 1 + rank", "1000 * seed + 1",
           check="samples", program=MAIN),
    Mutant("step forgotten", MAIN, "        optimizer.step()\n    with torch.no_grad():  # only", "    with torch.no_grad():  # only", check="basic, (weights|gradients|losses)"),
    Mutant("only rank 0 loads", MAIN, "    loaded_model.load_state_dict(",
           "    if rank == 0:\n        loaded_model.load_state_dict(", check="checkpoint, weights"),
    Mutant("the barrier after writing is forgotten", MAIN,
           "    dist.barrier()  # nobody may read before rank 0 has written\n", "", check="error: rank 1"),
    Mutant("the barrier before deleting is forgotten", MAIN,
           "    dist.barrier()  # Tutorial: deletes after a backward(), in which all have met. Here: before\n", "",
           check="error: rank 1"),
    Mutant("the path is not broadcast", MAIN,
           "    dist.broadcast_object_list(paths)  # rank 0's\n", "", check="error: rank 1"),
    Mutant("map_location forgotten", MAIN, "map_location=device, weights_only", "weights_only",
           check="how it is read"),
    Mutant("the split model loses its relu", MAIN, "x = self.relu(self.net1(x.to(self.dev0)))",
           "x = self.net1(x.to(self.dev0))", check="model_parallel, losses"),
    Mutant("all ranks are slow in skew.py", SKEW, "if rank == slow_rank else 0.0", "if slow_rank is not None else 0.0",
           check="skew, who"),
    Mutant("the even steps are their backwards", "ddp_basic/skew_results.py",
           "(start, end) for start, _, end in row[\"even_spans\"]", "(middle, end) for _, middle, end in row[\"even_spans\"]",
           check="skew, reported times", program=SKEW),
    Mutant("zero_grad forgotten in skew.py", SKEW,
           "        started = time.perf_counter()\n        optimizer.zero_grad()\n",
           "        started = time.perf_counter()\n", check="skew, gradients"),
    Mutant("the loss of one rank is reported as that of all", "ddp_basic/results.py",
           "[statistics.fmean(step) for step in zip(*rows, strict=True)]", "rows[0]",
           check="reported losses", program=MAIN),
]
