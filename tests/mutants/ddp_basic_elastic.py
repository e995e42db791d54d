"""Mistakes in `ddp_basic/elastic.py`."""

from tests.mutants import Mutant

MAIN = "ddp_basic/elastic.py"
KILLED = "tests/test_ddp_basic.py::test_killed_twice_at_random_moments"
MUTANTS = [
    Mutant("set_epoch forgotten", MAIN,
           "    sampler.set_epoch(epoch)  # without it, every epoch would have the same order\n", "",
           check="images"),
    Mutant("all ranks read the share of rank 0", MAIN,
           "DistributedSampler(train_set, world_size, rank, shuffle", "DistributedSampler(train_set, world_size, 0, shuffle",
           check="images"),
    Mutant("zero_grad forgotten", MAIN, "        optimizer.zero_grad()\n", "", check="gradients"),
    Mutant("the optimizer's state is not resumed", MAIN,
           '        optimizer.load_state_dict(state[0]["optimizer"])\n', "", check="resumed, weights"),
    Mutant("only rank 0 loads the weights", MAIN,
           '        model.load_state_dict(state[0]["model"])\n        optimizer.load_state_dict(state[0]["optimizer"])\n',
           '        if rank == 0:\n            model.load_state_dict(state[0]["model"])\n'
           '            optimizer.load_state_dict(state[0]["optimizer"])\n',
           check="resumed, (weights|gradients)"),
    Mutant("a resumed training repeats the last epoch", MAIN, "range(len(history) + 1, args.epochs + 1)",
           "range(max(1, len(history)), args.epochs + 1)", check="resumed"),
    Mutant("accuracy of the training set", MAIN, "accuracy = evaluate(model, test_set,", "accuracy = evaluate(model, train_set,",
           check="reported"),
    Mutant("all ranks judge as many images as this one", MAIN, "correct.item() / len(test_set)",
           "correct.item() / (len(labels) * world_size)", check="reported"),
    Mutant("the mean of the batches' means", MAIN,
           "        total += loss.detach() * len(batch)\n    return total / sum(map(len, batches))",
           "        total += loss.detach()\n    return total / len(batches)", check="reported"),
    Mutant("each rank reports its own accuracy", MAIN, "    dist.all_reduce(correct)\n", "", check="reported"),
    Mutant("the sum of the losses for the mean", MAIN, "loss.item() / world_size", "loss.item()", check="reported history"),
    Mutant("the batch of all ranks on each rank", MAIN, ".split(args.global_batch_size // world_size)",
           ".split(args.global_batch_size)", check="images"),
    Mutant("DDP sums in another order after an interruption", MAIN,
           "    ddp_model(train_set.tensors[0][:1]).sum().backward()\n", "", check="resumed as if never stopped",
           flags=("--world_size", "3", "--global_batch_size", "48")),
    Mutant("new workers find the addresses of dead ones", MAIN,
           '        store = dist.PrefixStore(f"attempt {attempt()}", store)\n', "        pass\n", test=KILLED),
    Mutant("momentum forgotten", MAIN, "lr=args.lr, momentum=MOMENTUM)", "lr=args.lr)", check="weights"),
]
