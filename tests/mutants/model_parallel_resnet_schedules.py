"""Mistakes in the schedules of `torch.distributed.pipelining` (beside tutorial 6_7)."""

from tests.mutants import Mutant

MAIN = "model_parallel_resnet/schedules.py"
SMALL = ("--arch", "resnet18", "--num_splits", "1", "2")


def mutant(name, old, new, check, schedule="gpipe", file=MAIN):
    """All with the smaller model."""
    return Mutant(name, file, old, new, check=check, flags=(*SMALL, "--schedule", schedule), program=MAIN)


MUTANTS = [
    mutant("zero_grad forgotten", "        self.opt.zero_grad()\n", "", "weights"),
    mutant("gradients not divided by the number of micro-batches",
           '"loss_fn": nn.MSELoss()}', '"loss_fn": nn.MSELoss(), "scale_grads": False}', "weights"),
    mutant("loss of the last micro-batch only",
           "return sum(loss.item() for loss in losses) / num_split if losses else None",
           "return losses[-1].item() if losses else None", "losses"),
    mutant("only the last stage steps", "        self.opt.step()\n",
           "        self.has_loss and self.opt.step()\n", "steps"),
    mutant("always the first schedule", "self.schedules[num_split].step(",
           "self.schedules[1].step(", "micro-batches"),
    mutant("stages numbered the other way round", "TimedStage(model, stage, self.num_stages",
           "TimedStage(model, self.num_stages - 1 - stage, self.num_stages", "error|weights|micro-batches"),
    mutant("the quarters cut elsewhere", ".seq, 5  # layer2", ".seq, 4  # layer1",
           "micro-batches|weights|error", "interleaved"),
    mutant("the optimizer has one of two stages", "optim.SGD(self.models.parameters(), lr=args.lr)",
           "optim.SGD(self.models[0].parameters(), lr=args.lr)", "weights", "interleaved"),
    mutant("no gradients of the weights", "timed(PipelineStage.backward_weight_one_chunk)", "timed(lambda *_, **__: None)",
           "gradients|error", "zero_bubble", "model_parallel_resnet/measuring.py"),
    mutant("loop where the schedule wants a V", "ScheduleZBVZeroBubble, V)", "ScheduleZBVZeroBubble, LOOP)",
           "error|steps|micro-batches", "zero_bubble_v"),
    mutant("all forwards first, where one goes back as soon as it can", '"1f1b": (Schedule1F1B,', '"1f1b": (ScheduleGPipe,',
           "in flight", "1f1b"),
    mutant("the first quarter twice", "    return layers[cut:] if stage % 2 else layers[:cut]\n",
           "    return layers[:cut] if stage % 2 == 0 or stage == 1 else layers[cut:]\n", "error|weights", "zero_bubble"),
]
