"""Mistakes in a table whose rows are spread over the trainers (beside tutorial 6_9)."""

from tests.mutants import Mutant

MAIN = {"file": "ddp_rpc_hybrid/sharded_table.py"}
RESULTS = {"file": "ddp_rpc_hybrid/sharded_table_results.py", "program": "ddp_rpc_hybrid/sharded_table.py"}
HANGS = ("--timeout", "10")
UNEVEN = ("--world_size", "3", *HANGS)  # of 100 rows, the last rank owns fewer
EMPTY = ("--num_embeddings", "2", *UNEVEN)  # the last rank owns none

MUTANTS = [
    Mutant("the rows' gradients are averaged over the trainers", **MAIN, check="table gradient",
           old="        return exchange(gradient, receive, send), None, None",
           new="        return exchange(gradient, receive, send) / dist.get_world_size(), None, None"),
    Mutant("gradients go back with the counts of the way there", **MAIN, check="error: rank", flags=HANGS,
           old="exchange(gradient, receive, send), None", new="exchange(gradient, send, receive), None"),
    Mutant("each owner is asked for the rows of another one", **MAIN, check="asked|error",
           old="        owner = indices // self.part\n",
           new="        owner = (indices // self.part + 1) % self.world_size\n"),
    Mutant("questions not ordered by owners", **MAIN, check="asked|error: rank", flags=HANGS,
           old="        questions = questions[owner.argsort(stable=True)]\n", new=""),
    Mutant("the bags of two trainers are taken for one", **MAIN, check="sums",
           old="bags = asked[:, 1] + first.repeat_interleave(n_asked)", new="bags = asked[:, 1]"),
    Mutant("an owner answers the sum of all that it is asked, offsets lost", **MAIN, check="sums",
           old="sums = self.rows(asked[:, 0], begin)", new="sums = self.rows(asked[:, 0], begin.clamp(max=0))"),
    Mutant("duplicate indices counted once", **MAIN, check="(asked|sums)",
           old="        owner = indices // self.part\n",
           new="        first = [i for i, n in enumerate(indices.tolist()) if n not in indices[:i].tolist()]\n"
               "        offsets = torch.searchsorted(torch.tensor(first), offsets)\n"
               "        indices = indices[first]\n        owner = indices // self.part\n"),
    Mutant("of the owners' sums only the first one's is taken", **MAIN, check="sums",
           old="answers.view(self.world_size, len(offsets), -1).sum(dim=0)",
           new="answers.view(self.world_size, len(offsets), -1)[0]"),
    Mutant("the owner's range is off by one", **MAIN, check="first weights|error: rank",
           old="table[rank * self.part : (rank + 1) * self.part]",
           new="table[rank * self.part + 1 : (rank + 1) * self.part + 1]"),
    Mutant("parts rounded down: the last rows belong to no rank", **MAIN, check="first weights|error", flags=UNEVEN,
           old="self.part = -(-len(table) // world_size)", new="self.part = max(1, len(table) // world_size)"),
    Mutant("a table of its own on each rank", **MAIN, check="first weights",
           old="        torch.manual_seed(args.seed)\n        table = ",
           new="        torch.manual_seed(args.seed + rank)\n        table = "),
    Mutant("a rank that is asked nothing does not answer", **MAIN, check="error: rank", flags=EMPTY,
           old="        # Number the bags of all ranks consecutively",
           new="        if len(asked) == 0:\n            return torch.zeros(len(offsets), self.rows.embedding_dim)\n"
               "        # Number the bags of all ranks consecutively"),
    Mutant("a rank that has looked up none of its own rows makes no step", **MAIN, check="dense", flags=EMPTY,
           old="            opt.step()\n",
           new="            if (indices // model.table.part == rank).any():\n"
               "                opt.step()\n"),
    Mutant("no gradient for the table", **MAIN, check="table gradient|error",
           old="        answers = AllToAll.apply(sums, their_bags.tolist(), my_bags)\n",
           new="        answers = exchange(sums, their_bags.tolist(), my_bags)\n"),
    Mutant("the optimizer does not know the table", **MAIN, check="table$",
           old="optim.SGD(model.parameters(), ", new="optim.SGD(model.fc.parameters(), "),
    Mutant("zero_grad forgotten", **MAIN, check="dense gradient", old="            opt.zero_grad()\n", new=""),
    Mutant("replicas without DDP", **MAIN, check="dense gradient",
           old='DDP(fc, device_ids=[device] if device.type == "cuda" else None)', new="fc"),
    Mutant("the mean of a bag", **MAIN, check="sums", old='mode="sum"', new='mode="mean"'),
    Mutant("questions of a trainer to itself count as sent", **RESULTS, check="reported bytes_per_step",
           old="(indices // self.table.part != self.rank).sum().item()", new="len(indices)"),
    Mutant("the table's part of rank 0, not the largest", **RESULTS, check="reported table", flags=UNEVEN,
           old="max(trainer[key] for trainer in trainers)", new="min(trainer[key] for trainer in trainers)"),
    Mutant("each rank keeps the memory of the full table", **MAIN, check="reported table_bytes",
           old="(rank + 1) * self.part].clone()", new="(rank + 1) * self.part]"),
]
