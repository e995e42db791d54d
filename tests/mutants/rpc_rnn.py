"""Mistakes in the language model over RPC (tutorial 6_5, second half)."""

from tests.mutants import Mutant

MAIN = {"file": "rpc_rnn/main.py", "program": "rpc_rnn/main.py"}
RESULTS = {"file": "rpc_rnn/results.py", "program": "rpc_rnn/main.py"}
DATA = {"file": "rpc_rnn/data.py", "program": "rpc_rnn/main.py"}

MUTANTS = [
    Mutant("a plain optimizer", **MAIN, check="weights after each step, LSTM",
           old="                opt.step(context_id)\n",
           new="                torch.optim.SGD(model.parameters(), lr=args.lr).step()\n"),
    Mutant("state not carried over", **MAIN, check="training, state carried over",
           old="                output, hidden = model(data, hidden)\n",
           new="                output, _ = model(data, hidden)\n"),
    Mutant("state of the last epoch goes on", **MAIN, check="training, state carried over",
           old="hidden = model.init_hidden(args.batch_size)\n",
           new="hidden = hidden if epoch else model.init_hidden(args.batch_size)\n"),
    Mutant("state not detached", **MAIN, check="error|without history",
           old="                hidden[0].detach_()  # keeps the values, drops the graph of the step before\n                hidden[1].detach_()\n",
           new=""),
    Mutant("optimizer does not know the decoder", **MAIN, check="weights after each step, decoder",
           old="        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())\n", new=""),
    Mutant("optimizer made anew in each epoch", **MAIN, check="weights after each step",
           old="        # With a dropout seed for each epoch",
           new="        opt = DistributedOptimizer(Adam, model.parameter_rrefs(), lr=args.lr)\n"
               "        # With a dropout seed for each epoch"),
    Mutant("dropout never on", **MAIN, check="training, loss",
           old="model.set_mode(training=True,", new="model.set_mode(training=False,"),
    Mutant("the same masks in every epoch", **MAIN, check="training, loss",
           old="1_000_000 * args.seed + 1000 * epoch", new="1_000_000 * args.seed"),
    Mutant("no dropout before the decoder", **MAIN, check="training, loss",
           old="self.decoder(self.drop(output.to(self.device)))", new="self.decoder(output.to(self.device))"),
    Mutant("dropout off on the trainer only", **MAIN, check="validation, loss",
           old="        for rref in (self.emb_table_rref, self.decoder_rref):\n",
           new="        for rref in (self.emb_table_rref, self.decoder_rref) if training else ():\n"),
    Mutant("scores and targets of other tokens", **MAIN, check="training, loss",
           old="criterion(output.flatten(0, 1), target.flatten())",
           new="criterion(output.transpose(0, 1).flatten(0, 1), target.flatten())"),
    Mutant("table and decoder draw alike", **MAIN, check="first weights, drawn",
           old="args=(ntoken, nhid, dropout, 3 * seed + 2, device)",
           new="args=(ntoken, nhid, dropout, 3 * seed, device)"),
    Mutant("the LSTM's seed forgotten", **MAIN, check="first weights, drawn",
           old="        torch.manual_seed(3 * seed + 1)\n", new=""),
    Mutant("targets are the inputs", **DATA, check="training, targets",
           old="yield table[start:end].long(), table[start + 1 : end + 1].long()",
           new="yield table[start:end].long(), table[start:end].long()"),
    Mutant("a short last piece counts like the others", **RESULTS, check="metrics, losses of the epochs",
           old="sum(loss * n / rows for loss, n in losses)", new="sum(loss / len(losses) for loss, n in losses)"),
    Mutant("perplexity of the training loss", **RESULTS, check="metrics, loss before and perplexity",
           old='val_loss = history.epochs[-1]["val_loss"]', new='val_loss = history.epochs[-1]["loss"]'),
    Mutant("validated on the training text", file="rpc_rnn/data.py",
           test="tests/test_rpc_rnn.py::test_data_are_no_uninitialized_memory",
           old="chain.draw(VAL_TOKENS, args.seed + 2)", new="chain.draw(VAL_TOKENS, args.seed + 1)"),
]
