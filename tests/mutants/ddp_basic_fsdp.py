"""Mistakes in `ddp_basic/fsdp.py`."""

from tests.mutants import Mutant

MAIN, FOLDERS, MEMORY = "ddp_basic/fsdp.py", "ddp_basic/fsdp_checkpoint.py", "ddp_basic/fsdp_memory.py"
TWO = ("--world_size", "2")
FULL = ("--world_size", "2", "--sharding", "full")
MUTANTS = [
    Mutant("zero_grad forgotten", MAIN, "            optimizer.zero_grad()\n", "", check="gradients", flags=TWO),
    Mutant("all ranks train on the same share", MAIN, "[batch[rank::world_size] for", "[batch[::world_size] for",
           check="samples", flags=TWO),
    Mutant("the same order in each epoch", MAIN, "manual_seed(args.seed + epoch))", "manual_seed(args.seed))",
           check="samples", flags=TWO),
    Mutant("DDP is made, and the bare model called", MAIN, "    return ddp_model, optim.Adam(", "    return model, optim.Adam(",
           check="replicas, gradients", flags=TWO),
    Mutant("a plain Adam in the place of ZeroRedundancyOptimizer", MAIN,
           "    return ddp_model, ZeroRedundancyOptimizer(\n        ddp_model.parameters(), optimizer_class=optim.Adam, lr=args.lr)",
           "    optimizer = optim.Adam(ddp_model.parameters(), lr=args.lr)\n    return ddp_model, optimizer",
           check="optimizer, Adam", flags=TWO),
    Mutant("the optimizer is made before the model is sharded", MAIN,
           "    for layer in model.modules():\n        if isinstance(layer, nn.Linear):\n            fully_shard(layer, mesh=mesh)\n"
           "    fully_shard(model, mesh=mesh)\n    return model, optim.Adam(model.parameters(), lr=args.lr)",
           "    optimizer = optim.Adam(model.parameters(), lr=args.lr)\n    for layer in model.modules():\n"
           "        if isinstance(layer, nn.Linear):\n            fully_shard(layer, mesh=mesh)\n"
           "    fully_shard(model, mesh=mesh)\n    return model, optimizer", check="full, weights|error: rank", flags=FULL),
    Mutant("the whole network is one group", MAIN,
           "    for layer in model.modules():\n        if isinstance(layer, nn.Linear):\n            fully_shard(layer, mesh=mesh)\n",
           "", check="full, gathered at a time", flags=FULL),
    Mutant("each rank has other initial weights", MAIN, "    torch.manual_seed(args.seed)  #",
           "    torch.manual_seed(args.seed + dist.get_rank())  #", check="full, weights", flags=FULL),
    Mutant("another learning rate for the shards", MAIN, "lr=args.lr)  # after: of the shards",
           "lr=args.lr / dist.get_world_size())", check="full, weights", flags=FULL),
    Mutant("Adam's state is not resumed", MAIN,
           '    set_state_dict(model, optimizer, model_state_dict=saved["model"],\n'
           '                   optim_state_dict=saved["optimizer"])',
           '    model.load_state_dict(saved["model"])\n    optimizer.state.clear()', check="resumed, (weights|Adam)", flags=FULL),
    Mutant("the weights are not in the checkpoint", MAIN, 'dcp.save({"model": weights, "optimizer": state}',
           'dcp.save({"model": build_model(args).state_dict(), "optimizer": state}', check="resumed|error: rank", flags=FULL),
    Mutant("a resumed training repeats the last epoch", MAIN, "range(len(history) + 1, args.epochs + 1)",
           "range(max(1, len(history)), args.epochs + 1)", check="resumed", flags=FULL),
    Mutant("half a checkpoint has the name of a whole one", FOLDERS, 'temporary = folder / f".epoch{epoch:05}.tmp"',
           'temporary = folder / f"epoch{epoch:05}"', check="error: rank", flags=FULL, program=MAIN),
    Mutant("the oldest checkpoint for the last", FOLDERS, "    return sorted(found, key=lambda path: int(path.name[5:]))",
           "    return sorted(found, key=lambda path: -int(path.name[5:]))", check="checkpoints left", flags=FULL,
           program=MAIN),
    Mutant("the bytes of the whole tensors are counted", MEMORY,
           "    return tensor.to_local() if isinstance(tensor, DTensor) else tensor", "    return tensor",
           check="full, reported bytes held", flags=FULL, program=MAIN),
    Mutant("the state of all ranks' optimizers is counted as one rank's", MEMORY,
           "(1, 1, 2 / n)", "(1, 1, 2)", check="optimizer, reported formulas", flags=TWO, program=MAIN),
    Mutant("the bytes of an epoch for those of a step", MAIN, "None if sent is None else sent / len(seconds)", "sent",
           check="reported bytes sent", flags=TWO),
    Mutant("the loss of rank 0 for that of all", MAIN, "        dist.all_reduce(total)  # of equal shares: the mean of the means is the mean\n",
           "        total *= world_size\n", check="reported losses", flags=TWO),
]
