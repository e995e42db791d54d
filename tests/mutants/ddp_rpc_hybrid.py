"""Mistakes in DDP and RPC in one model (tutorial 6_9)."""

from tests.mutants import Mutant

MAIN = {"file": "ddp_rpc_hybrid/main.py", "program": "ddp_rpc_hybrid/main.py"}
RESULTS = {"file": "ddp_rpc_hybrid/results.py", "program": "ddp_rpc_hybrid/main.py"}

MUTANTS = [
    Mutant("a plain optimizer", **MAIN, check="dense part, weights after each step",
           old="                opt.step(context_id)\n",
           new="                optim.SGD(model.parameters(), lr=args.lr).step()\n"),
    Mutant("all trainers read the same batches", **MAIN, check="data, indices",
           old="1000 * epoch + rank  # other", new="1000 * epoch  # other"),
    Mutant("the same batches in every epoch", **MAIN, check="data, indices",
           old="1_000_000 * args.seed + 1000 * epoch + rank", new="1_000_000 * args.seed + rank"),
    Mutant("the master passes its own rank", **MAIN, check="data, indices",
           old="args=(emb_rref, trainer_rank, args), timeout=0)",
           new="args=(emb_rref, rank, args), timeout=0)"),
    Mutant("an index of the next bag", **MAIN, check="data, targets",
           old="teacher.target(indices, offsets)",
           new="teacher.target(indices, (offsets - 1).clamp(min=0))"),
    Mutant("replicas without DDP", **MAIN, check="dense part, weights after each step",
           old='DDP(fc, device_ids=[device] if device.type == "cuda" else None)', new="fc"),
    Mutant("optim.SGD, whose steps overlap", **MAIN, check="updates of the table, arrived once",
           old="DistributedOptimizer(SGD, ", new="DistributedOptimizer(optim.SGD, "),
    Mutant("the optimizer does not know the table", **MAIN, check="lockstep, table after each step",
           old="rpc.rpc_sync(PS_NAME, _retrieve_embedding_parameters, args=(emb_rref,))", new="[]"),
    Mutant("the optimizer knows the weight of the dense part only", **MAIN,
           check="dense part, weights after each step",
           old="    for param in model.parameters():\n",
           new="    for param in list(model.parameters())[:1]:\n"),
    Mutant("each step twice", **MAIN, check="updates of the table, arrived once",
           old="                opt.step(context_id)\n",
           new="                opt.step(context_id)\n                opt.step(context_id)\n"),
    Mutant("only the first trainer steps the table", **MAIN,
           check="lockstep, table after each step",
           old="    # ... and those here: model.parameters() has only these.\n",
           new="    model_parameter_rrefs = model_parameter_rrefs if rank == 0 else []\n"),
    Mutant("the mean of a bag", **MAIN, check="lockstep, looked-up sums",
           old='"mode": "sum"', new='"mode": "mean"'),
    Mutant("the sum of the losses", **MAIN, check="loss",
           old="criterion = nn.CrossEntropyLoss()",
           new='criterion = nn.CrossEntropyLoss(reduction="sum")'),
    Mutant("the table's seed forgotten", **MAIN, check="first weights, table",
           old="    torch.manual_seed(args.seed)  # on the server",
           new="    pass  # on the server"),
    Mutant("accuracy per step, not per bag", **RESULTS, check="metrics, loss and accuracy",
           old="sum(guessed) / sum(bags)",
           new="sum(g / b for g, b in zip(guessed, bags, strict=True)) / len(bags)"),
    Mutant("making batches counts as training time", **MAIN, check="metrics, steps per second",
           old="        batches = list(get_next_batch(rank, epoch, teacher, args))\n"
               "        history.begin_epoch()\n",
           new="        history.begin_epoch()\n"
               "        batches = list(get_next_batch(rank, epoch, teacher, args))\n"),
]
