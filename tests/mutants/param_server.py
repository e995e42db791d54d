"""Mistakes in `param_server/main.py` and its variant."""

from tests.mutants import Mutant

MAIN, DATA = "param_server/main.py", "param_server/data.py"
ASYNC = "param_server/async_server.py"


def mutant(name, file, old, new, check, flags=(), program=None):
    """One that `--check` must see: of the file, or of `main.py` if it is no program."""
    program = program or (ASYNC if file == ASYNC else MAIN)
    return Mutant(name, file, old, new, check=check, flags=flags, program=program)


MUTANTS = [
    mutant("the tutorial's optimizer, compiled, takes no lock", ASYNC,
           "DistributedOptimizer(AsyncSGD, param_rrefs, rank, lr=args.lr)",
           "DistributedOptimizer(torch.optim.SGD, param_rrefs, lr=args.lr)", check="updates"),
    mutant("every step is made twice", MAIN,
           "                opt.step(cid)  #", "                opt.step(cid)\n                opt.step(cid)  #",
           check="updates"),
    mutant("the step of the smaller batch is forgotten", MAIN,
           "opt.step(cid)  #", "len(data) < args.batch_size or opt.step(cid)  #", check="updates"),
    mutant("the gradients of two backward passes in a context", MAIN,
           "                dist_autograd.backward(cid, [loss])\n",
           "                dist_autograd.backward(cid, [loss], retain_graph=True)\n"
           "                dist_autograd.backward(cid, [loss])\n", check="gradients"),
    mutant("the sum for the mean", MAIN,
           "loss = F.nll_loss(model_output, target)\n",
           "loss = F.nll_loss(model_output, target, reduction='sum')\n",
           check="losses|gradients", flags=["--lr", 0.001]),
    mutant("all trainers have the same share", DATA,
           "shuffled[rank - 1 ::", "shuffled[0 ::", check="training images"),
    mutant("all trainers have all images", DATA,
           "shuffled[rank - 1 :: args.world_size - 1]", "shuffled", check="training images"),
    mutant("the server counts as a trainer in the shares", DATA,
           "shuffled[rank - 1 :: args.world_size - 1]", "shuffled[rank - 1 :: args.world_size]",
           check="training images"),
    mutant("the same order in every epoch", DATA, "+ 1000 * epoch + rank", "+ rank", check="training images"),
    mutant("the incomplete batch is dropped", DATA,
           "        yield train_set[batch]\n",
           "        if len(batch) == args.batch_size:\n            yield train_set[batch]\n", check="training images"),
    mutant("dropout is never on", MAIN, "    net.train()\n", "    net.eval()\n", check="dropout"),
    mutant("eval() reaches the wrapper only", MAIN,
           "        remote_method(ParameterServer.set_mode, self.param_server_rref, mode)\n", "", check="test log-prob"),
    mutant("the accuracy with dropout on", MAIN, "    model.eval()\n", "", check="test log-prob"),
    mutant("the accuracy of the training set", MAIN,
           "get_accuracy(test_set, net)", "get_accuracy(train_set, net)", check="test images|accuracy"),
    mutant("the accuracy over the batches, not the images", MAIN,
           "return correct_sum / len(labels)", "return correct_sum / 500", check="accuracy"),
    mutant("the mean of the batches' accuracies", MAIN,
           "pred.eq(target).sum().item()", "pred.eq(target).double().mean().item() * len(labels) / 2", "accuracy"),
    mutant("dropout of single pixels, not of channels", MAIN,
           "self.dropout1 = nn.Dropout2d(0.25)", "self.dropout1 = nn.Dropout(0.25)", check="dropout"),
    # For a 2-D input, torch draws as Dropout does, and warns.
    Mutant("the second dropout as in the tutorial", MAIN,
           "self.dropout2 = nn.Dropout(0.5)", "self.dropout2 = nn.Dropout2d(0.5)",
           test="tests/test_param_server.py::test_dropout_of_the_right_kind"),
    mutant("a ReLU too many", MAIN,
           "F.max_pool2d(self.conv2(x), 2)", "F.max_pool2d(F.relu(self.conv2(x)), 2)", check="dropout|losses"),
    mutant("copies that no gradient flows through", ASYNC,
           "name: param.clone() for", "name: param.detach().clone().requires_grad_() for", check="error"),
    mutant("copies of one moment forever", ASYNC,
           "            weights = {name: param.clone() for name, param in self.model.named_parameters()}\n",
           "            if not hasattr(self, 'weights'):\n"
           "                self.weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}\n"
           "            weights = {n: w + 0 * p for (n, w), p in zip(self.weights.items(), self.model.parameters())}\n",
           check="staleness"),
    mutant("one module for all trainers", ASYNC,
           "self.nets[trainer - 1]", "self.nets[0]", check="losses|gradients|staleness|error"),
    mutant("nobody waits for a turn", MAIN, "        self.lock.acquire()\n", "        self.lock.acquire(blocking=False)\n",
           check="turns|error"),
    mutant("the turn is over before the step", MAIN,
           "                opt.step(cid)  #",
           "                remote_method(ParameterServer.release, server)\n                opt.step(cid)\n"
           "                remote_method(ParameterServer.acquire, server)  #", check="turns|error"),
    mutant("the accuracy is taken while others train", MAIN,
           "    per_trainer = server.rpc_sync(timeout=0).join(rank, history.of_trainer())\n",
           "    accuracy = get_accuracy(test_set, net) if rank == 1 else None\n"
           "    per_trainer = server.rpc_sync(timeout=0).join(rank, history.of_trainer())\n"
           "    if rank == 1:\n        return {'test_accuracy': accuracy, 'per_trainer': per_trainer}\n",
           check="test|weights|dropout|updates", flags=["--world_size", 4]),
    mutant("another learning rate", MAIN, "SGD, param_rrefs, lr=args.lr)", "SGD, param_rrefs, lr=args.lr / 2)", check="weights"),
    mutant("momentum that nobody asked for", MAIN,
           "SGD, param_rrefs, lr=args.lr)", "SGD, param_rrefs, lr=args.lr, momentum=0.5)", check="weights"),
    mutant("an epoch too few", MAIN,
           "for epoch in range(first_epoch, args.epochs):", "for epoch in range(first_epoch + 1, args.epochs):",
           check="training images"),
    mutant("the loss of the last step only", "param_server/results.py",
           '{"loss": sum(map(sum, same)) / sum(map(len, same))}', '{"loss": same[0][-1]}', check="mean losses"),
    mutant("the seed is ignored", MAIN, "        torch.manual_seed(args.seed)\n", "", check="weights"),
    # Staleness.
    mutant("staleness from the end of the forward", ASYNC,
           "            self.note_read(trainer)\n"
           "            # Gradients flow through the copies to the parameters.\n"
           "            weights = {name: param.clone() for name, param in self.model.named_parameters()}\n"
           "        inp = inp.to(self.input_device)\n"
           "        return functional_call(self.nets[trainer - 1], weights, (inp,)).to(\"cpu\")\n",
           "            weights = {name: param.clone() for name, param in self.model.named_parameters()}\n"
           "        output = functional_call(self.nets[trainer - 1], weights, (inp.to(self.input_device),)).to('cpu')\n"
           "        with self.lock:\n"
           "            self.note_read(trainer)\n"
           "        return output\n", check="staleness"),
    mutant("a step counts itself", ASYNC,
           "        self.staleness[trainer].append(self.steps - self.read_at[trainer])\n        self.steps += 1\n",
           "        self.steps += 1\n        self.staleness[trainer].append(self.steps - self.read_at[trainer])\n",
           check="staleness"),
    mutant("only the steps of this trainer are counted", ASYNC,
           "        self.steps += 1\n", "        self.steps += trainer == 1\n", check="staleness"),
    mutant("one clock for all trainers", ASYNC,
           "        self.read_at[trainer] = self.steps\n",
           "        self.read_at = dict.fromkeys(range(99), self.steps)\n", check="staleness"),
    mutant("all steps are those of the first trainer", ASYNC,
           "AsyncSGD, param_rrefs, rank,", "AsyncSGD, param_rrefs, 1,", check="staleness"),
    mutant("the mean over the values, not the gradients", "param_server/results.py",
           "sum(ages) / len(ages) if", "sum(counts) / len(counts) if", check="staleness", program=ASYNC),
    mutant("the asynchronous server without copies", ASYNC,
           "name: param.clone() for", "name: param for", check="error|staleness"),
]
