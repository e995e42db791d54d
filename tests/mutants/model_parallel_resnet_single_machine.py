"""Mistakes in the pipeline of one process (tutorial 6_2)."""

from tests.mutants import Mutant

MAIN = "model_parallel_resnet/single_machine.py"


def mutant(name, old, new, check):
    """On the CPU."""
    return Mutant(name, MAIN, old, new, check=check, flags=("--device", "cpu"))


MUTANTS = [
    mutant("zero_grad forgotten", "        optimizer.zero_grad()\n        outputs",
           "        outputs", "weights"),
    mutant("last micro-batch forgotten",
           "        s_prev = self.seq2(s_prev)\n        ret.append(self.fc(s_prev.flatten(1)))\n"
           "        return torch.cat(ret)",
           "        return torch.cat(ret)", "raised RuntimeError"),
    mutant("number of splits for their size", "split(self.split_size, dim=0)",
           "chunk(self.split_size, dim=0)", "weights"),
    mutant("gradients stop between the halves",
           "            s_prev = self.seq1(s_next).to(self.dev1)\n        s_prev",
           "            s_prev = self.seq1(s_next).to(self.dev1).detach()\n        s_prev",
           "weights"),
    mutant("outputs in the wrong order", "return torch.cat(ret)", "return torch.cat(ret[::-1])",
           "losses"),
    mutant("evaluation mode", "model.train(True)", "model.train(False)",
           "running statistics|weights"),
    mutant("only one step of several", "for _ in range(args.num_batches):",
           "for _ in range(1):", "data|weights"),
    mutant("other images in each step", "outputs = model(inputs.to(args.devices[0]))",
           "inputs = torch.randn_like(inputs)\n        outputs = model(inputs.to(args.devices[0]))",
           "data"),
    mutant("one model for both rows", "ModelParallelResNet50(copy.deepcopy(resnet), args.devices)\n"
           "    # All", "ModelParallelResNet50(resnet, args.devices)\n    # All", "weights"),
    mutant("table's rows mislabelled", "for row, (_, model, split_size) in turns:",
           "for row, (_, model, split_size) in zip(rows, [c for _, c in turns], strict=True):",
           "losses"),
    mutant("split size set too late",
           "                pipeline.split_size = split_size\n"
           "                seconds, losses = time_training(model, inputs, labels, args)\n",
           "                seconds, losses = time_training(model, inputs, labels, args)\n"
           "                pipeline.split_size = split_size\n", "weights|raised"),
    mutant("clock read before the devices are done",
           "    synchronize(args.devices)  # Tutorial: the clock was read while kernels were still queued.\n",
           "", "clock"),
    mutant("toy model without its activation", "x = self.relu(self.net1(x.to(self.dev0)))",
           "x = self.net1(x.to(self.dev0))", "toy"),
]
