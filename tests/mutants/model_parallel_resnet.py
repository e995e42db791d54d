"""Mistakes in the pipeline over RPC (tutorial 6_7)."""

from tests.mutants import Mutant

MAIN = "model_parallel_resnet/main.py"
RESULTS, MEASURING = "model_parallel_resnet/results.py", "model_parallel_resnet/measuring.py"
SMALL = ("--arch", "resnet18", "--num_splits", "1", "3")


def mutant(name, old, new, check="", file=MAIN, test="", flags=()):
    """All with the smaller model: a check of a few seconds."""
    return Mutant(name, file, old, new, check=check, test=test and f"tests/{test}", flags=(*SMALL, *flags), program=MAIN)


MUTANTS = [
    mutant("a plain optimizer, which finds no gradients", "opt.step(context_id)\n",
           "torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()\n", "weights"),
    mutant("split size for split number", "xs.tensor_split(self.num_split)",
           "xs.split(self.num_split)", "micro-batches"),
    mutant("micro-batches joined in the wrong order", "torch.cat(wait_all(out_futures))",
           "torch.cat(wait_all(out_futures)[::-1])", "outputs"),
    mutant("parameters of one shard only",
           "for rref in (self.p1_rref, self.p2_rref)\n",
           "for rref in (self.p2_rref,)\n", "weights"),
    mutant("each step twice", "                opt.step(context_id)\n",
           "                opt.step(context_id)\n" * 2, "^steps$"),
    mutant("loss summed over micro-batches, not over images",
           "loss = loss_fn(outputs, labels)\n",
           "n = model.num_split\n                loss = sum(map(loss_fn, outputs.tensor_split(n), "
           "labels.tensor_split(n))) / n\n", "weights"),
    mutant("the master waits for worker1", "forward(y_rref, i)", "forward(RRef(y_rref.to_here()), i)", "sent at once"),
    mutant("features through the master", "self.p1_rref.remote().forward(x_rref, i)",
           "RRef(self.p1_rref.rpc_sync().forward(x_rref, i))", "owners"),
    mutant("number of splits set only once", "            model.num_split = num_split\n",
           "            model.num_split = model.num_split or num_split\n", "micro-batches"),
    mutant("a shard in evaluation mode",
           "            nn.AdaptiveAvgPool2d((1, 1)))\n",
           "            nn.AdaptiveAvgPool2d((1, 1))).eval()\n", "running statistics"),
    mutant("no lock in the first shard",
           "        x = x_rref.to_here().to(self.device)  "
           "# before the lock: it travels while others compute\n        with self._lock:\n",
           "        x = x_rref.to_here().to(self.device)\n        if True:\n",
           "one micro-batch at a time|running"),
    mutant("activations detached between the shards",
           "            out = self.fc(torch.flatten(self.seq(x), 1))\n",
           "            out = self.fc(torch.flatten(self.seq(x.detach()), 1))\n",
           "weights|micro-batches"),
    mutant("weights of the second shard as torch gives them",
           "num_classes)\n        self._init_weights()\n", "num_classes)\n", "outputs"),
    mutant("--seed ignored where the shards draw", "torch.manual_seed(seed)\n\n    def", "torch.manual_seed(2 - seed % 2)\n\n    def", "outputs",
           flags=("--seed", "7")),
    mutant("the first shard with another seed", "args=(block, blocks[:2], device, 2 * seed + 1)",
           "args=(block, blocks[:2], device, 2 * seed)", "outputs"),
    mutant("both shards with one seed", "args=(block, blocks[2:], num_classes, device, 2 * seed + 2)",
           "args=(block, blocks[2:], num_classes, device, 2 * seed + 1)", "outputs"),
    mutant("warm-up among the timed batches", "[times[1:] for times", "[times for times", "timed", RESULTS),
    mutant("clock read before the backward",
           "                outputs = model(inputs)\n",
           "                outputs = model(inputs)\n                started = time.time()\n", "timed"),
    mutant("rows of the table in another order", "zip(args.num_splits, medians, metrics",
           "zip(args.num_splits[::-1], medians, metrics", file=RESULTS, test="test_reports.py::test_pipeline"),
    mutant("mean for median", "medians = [statistics.median(", "medians = [statistics.fmean(",
           file=RESULTS, test="test_reports.py::test_pipeline"),
    mutant("a wait counted twice", 'parts["messages"] += b - a - waited', 'parts["messages"] += b - a', file=MEASURING,
           test="test_model_parallel_resnet.py::test_the_parts_of_a_batch"),
    mutant("downsample without its stride",
           "conv1x1(self.inplanes, planes * self._block.expansion, stride)",
           "conv1x1(self.inplanes, planes * self._block.expansion)", "layers|error"),
]
