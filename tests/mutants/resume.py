"""What a resumed training takes over, left out: of the programs that save to a file (elastic has its own)."""

from tests.mutants import Mutant

STOPPED = "tests/test_checkpoints.py::test_stopped_and_resumed"
CHECKPOINT, SERVER, SAVING = "common/checkpoint.py", "param_server/main.py", "rpc_rnn/saving.py"
SERVED = "param_server/data.py"
FAST, TRAIN = "rpc_rl/fast.py", "p2p_collectives/train.py"


def stopped(name, file, old, new, lesson):
    """A training that was stopped and resumed must end as one that was not, to the last bit."""
    return Mutant(name, file, old, new, test=f"{STOPPED}[{lesson}]")


MUTANTS = [
    stopped("the server begins with epoch 0", SERVED, '    return state["epochs"]\n', "    return 0\n", "param_server.main"),
    stopped("the server draws its masks anew", SERVED, '    torch.set_rng_state(state["random_numbers"])\n', "",
           "param_server.main"),
    stopped("an epoch less than there was is saved", SERVER, ".save, server, epoch + 1)", ".save, server, epoch)",
           "param_server.main"),
    stopped("new optimizers for an old model", SAVING,
           "        rpc.rpc_sync(local.owner(), _load_optimizer_state, args=(local, saved))\n", "        pass\n", "rpc_rnn.main"),
    stopped("the decoder begins anew", SAVING, ', ("decoder", model.decoder_rref)):', ",):", "rpc_rnn.main"),
    stopped("the LSTM begins anew", SAVING, '    model.rnn.load_state_dict(parts["rnn"])\n', "", "rpc_rnn.main"),
    stopped("the optimizers' states in the wrong order", SAVING, 'opt.remote_optimizers, state["optimizers"]',
           'opt.remote_optimizers, reversed(state["optimizers"])', "rpc_rnn.main"),
    stopped("the loss before the first step is that of the resumed model", SAVING,
           'return state["epochs"], state["initial_val_loss"]', 'return state["epochs"], state["epochs"][-1]["val_loss"]',
           "rpc_rnn.main"),
    stopped("the agent's Adam begins anew", FAST, '        self.optimizer.load_state_dict(state["optimizer"])\n', "", "rpc_rl.fast"),
    stopped("the draws of actions begin anew", FAST, "            generator.set_state(saved)\n", "            pass\n", "rpc_rl.fast"),
    stopped("the running reward begins anew", FAST, '    agent.running_reward = state["history"]["running_reward"]\n', "",
           "rpc_rl.fast"),
    stopped("episodes are counted anew", FAST, 'episode = history.kept["episodes"]', "episode = 0", "rpc_rl.fast"),
    stopped("no rank but the first has the weights", TRAIN, "    dist.broadcast_object_list(state)\n    [state] = state\n",
           "    [state] = state\n    if state is None:\n        return []\n", "p2p_collectives.train_ddp"),
    Mutant("samples of before the checkpoint are in the speed", "p2p_collectives/train_results.py", "len(self.epochs) - self.first",
           "len(self.epochs)", check="samples", program=TRAIN),
    Mutant("a training that is over is refused", CHECKPOINT, "args.epochs < behind", "args.epochs <= behind",
           test=f"{STOPPED}[param_server.main]"),
    Mutant("the settings are not saved", CHECKPOINT, '"settings": args.settings, ', "",
           test="tests/test_checkpoints.py::test_what_is_refused[p2p_collectives.train_ddp]"),
    Mutant("the oracle's training goes on, the server's begins anew", SERVED,
           '    model.load_state_dict(state["model"])\n', "",
           test="tests/test_param_server.py::test_check_of_a_resumed_training"),
]
