"""Mistakes in `p2p_collectives/train.py`."""

from tests.mutants import Mutant

MAIN, DATA, RESULTS = "p2p_collectives/train.py", "p2p_collectives/data.py", "p2p_collectives/train_results.py"
FLAT, DDP = "p2p_collectives/train_flat.py", "p2p_collectives/train_ddp.py"
MUTANTS = [
    Mutant("pieces weigh the same", MAIN, "        param.grad *= share", "        param.grad /= dist.get_world_size()",
           check="gradients"),
    Mutant("zero_grad forgotten", MAIN, "                optimizer.zero_grad()\n", "", check="gradients"),
    Mutant("zero_grad forgotten with flat gradients", FLAT, "                optimizer.zero_grad()\n", "", check="gradients"),
    Mutant("flat gradients in another order", FLAT, "zip(params, flat.split([param.numel() for param in params])",
           "zip(params[::-1], flat.split([param.numel() for param in params[::-1]])", check="gradients|error"),
    Mutant("all_reduce of the last parameter only", MAIN,
           "        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)\n",
           "    dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)\n", check="gradients|error"),
    Mutant("the sum for the mean", MAIN, "        param.grad *= share", "        param.grad *= 1", check="gradients"),
    Mutant("pieces weigh the same in DDP", DDP, "(loss * share * size).backward()", "loss.backward()",
           check="gradients"),
    Mutant("all ranks train on the first part", MAIN, "partitioner.use(dist.get_rank())", "partitioner.use(0)",
           check="images"),
    Mutant("the parts overlap: a seed for each rank", MAIN, "partition_sizes, args.seed)",
           "partition_sizes, args.seed + dist.get_rank())", check="images"),
    Mutant("the same order in every epoch", MAIN, "1000 * epoch + dist.get_rank())", "dist.get_rank())", check="images"),
    Mutant("the same order and dropout on all ranks", MAIN, "1000 * epoch + dist.get_rank())", "1000 * epoch)", check="images|loss"),
    Mutant("lengths rounded down, as in the tutorial", MAIN, "len(data) + 0.5)", "len(data))", check="images|error"),
    Mutant("each length rounded", MAIN, "math.floor(sum(sizes[: part + 1]) * len(data) + 0.5)",
           "start + math.floor(sizes[part] * len(data) + 0.5)", check="images", flags=("--world_size", "3")),
    Mutant("dropout never on", MAIN, "                optimizer.zero_grad()\n",
           "                model.eval()\n                optimizer.zero_grad()\n", check="images|loss"),
    Mutant("dropout stays off after the first evaluation", RESULTS, "    model.train()\n", "", check="images|loss", program=MAIN),
    Mutant("accuracy of the training set", MAIN, "model, optimizer, test_set, args)\n    require", "model, optimizer, train_set.data, args)\n    require",
           check="reported epochs"),
    Mutant("other weights on each rank", MAIN, "    torch.manual_seed(args.seed)  # the same on all ranks, so all start with the same weights\n",
           "    torch.manual_seed(args.seed + rank)\n", check="weights|error"),
    Mutant("a resumed training starts without momentum", MAIN,
           '    optimizer.load_state_dict(state["optimizer"])\n', "", check="resumed, weights"),
    Mutant("the loss of each batch has the same weight", MAIN, "* len(target) / len(train_set)",
           "/ len(global_batches)", check="reported epochs"),
    Mutant("momentum forgotten", MAIN, "momentum=MOMENTUM", "momentum=0.0", check="weights"),
    Mutant("one sample of each part is lost", DATA, "split(torch.randperm(len(train_set)),",
           "split(torch.randperm(len(train_set))[1:],", check="images", program=MAIN),
    Mutant("flat is not weighted", FLAT, "    flat *= share\n", "    flat /= dist.get_world_size()\n", check="gradients"),
]
