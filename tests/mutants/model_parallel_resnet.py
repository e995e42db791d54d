"""Mistakes in the pipeline over RPC (tutorial 6_7)."""

from tests.mutants import Mutant

MAIN = "model_parallel_resnet/main.py"
SMALL = ("--arch", "resnet18", "--num_splits", "1", "3")


def mutant(name, old, new, check, flags=()):
    """All with the smaller model: a check of a few seconds."""
    return Mutant(name, MAIN, old, new, check=check, flags=(*SMALL, *flags))


MUTANTS = [
    mutant("a plain optimizer, which finds no gradients", "opt.step(context_id)\n",
           "torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()\n", "weights"),
    mutant("split size for split number", "xs.tensor_split(self.num_split)",
           "xs.split(self.num_split)", "micro-batches"),
    mutant("micro-batches joined in the wrong order", "torch.cat(wait_all(out_futures))",
           "torch.cat(wait_all(out_futures)[::-1])", "outputs"),
    mutant("parameters of one shard only",
           "        remote_params.extend(self.p1_rref.remote().parameter_rrefs().to_here())\n",
           "        self.p1_rref.remote().parameter_rrefs().to_here()\n", "weights"),
    mutant("each step twice", "                opt.step(context_id)\n",
           "                opt.step(context_id)\n" * 2, "^steps$"),
    mutant("loss summed over micro-batches, not over images",
           "loss = loss_fn(outputs, labels)\n",
           "n = model.num_split\n                loss = sum(map(loss_fn, outputs.tensor_split(n), "
           "labels.tensor_split(n))) / n\n", "gradients"),
    mutant("the master waits for worker1", "forward(y_rref)", "forward(RRef(y_rref.to_here()))", "sent at once"),
    mutant("features through the master", "self.p1_rref.remote().forward(x_rref)",
           "RRef(self.p1_rref.rpc_sync().forward(x_rref))", "owners"),
    mutant("number of splits set only once", "            model.num_split = num_split\n",
           "            model.num_split = model.num_split or num_split\n", "micro-batches"),
    mutant("a shard in evaluation mode",
           "            nn.AdaptiveAvgPool2d((1, 1)))\n",
           "            nn.AdaptiveAvgPool2d((1, 1))).eval()\n", "running statistics"),
    mutant("no lock in the first shard",
           "        with self._lock:\n            out = self.seq(x)\n",
           "        if True:\n            out = self.seq(x)\n", "one micro-batch at a time|running"),
    mutant("activations detached between the shards",
           "            out = self.fc(torch.flatten(self.seq(x), 1))\n",
           "            out = self.fc(torch.flatten(self.seq(x.detach()), 1))\n", "gradients"),
    mutant("a gradient that is only half as large",
           "            out = self.fc(torch.flatten(self.seq(x), 1))\n",
           "            out = self.fc(torch.flatten(self.seq((x + x.detach()) / 2), 1))\n", "gradients"),
    mutant("weights of the second shard as torch gives them",
           "num_classes)\n        self._init_weights()\n", "num_classes)\n", "outputs"),
    mutant("--seed ignored where the shards draw", "torch.manual_seed(seed)\n\n    def", "torch.manual_seed(2 - seed % 2)\n\n    def", "outputs",
           flags=("--seed", "7")),
    mutant("the first shard with another seed", "args=(block, blocks[:2], device, 2 * seed + 1)",
           "args=(block, blocks[:2], device, 2 * seed)", "outputs"),
    mutant("both shards with one seed", "args=(block, blocks[2:], num_classes, device, 2 * seed + 2)",
           "args=(block, blocks[2:], num_classes, device, 2 * seed + 1)", "outputs"),
    mutant("a block fewer in layer3", '("BasicBlock", [2, 2, 2, 2])', '("BasicBlock", [2, 2, 1, 2])', "layers"),
    mutant("downsample without its stride",
           "conv1x1(self.inplanes, planes * self._block.expansion, stride)",
           "conv1x1(self.inplanes, planes * self._block.expansion)", "layers|error"),
]
