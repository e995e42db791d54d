"""Mistakes in the language model over RPC (tutorial 6_5, second half)."""

from tests.mutants import Mutant

MAIN = {"file": "rpc_rnn/main.py", "program": "rpc_rnn/main.py"}
TRAINERS = {"file": "rpc_rnn/several_trainers.py", "program": "rpc_rnn/main.py"}
EVALUATION = {"file": "rpc_rnn/evaluation.py", "program": "rpc_rnn/main.py"}
RESULTS = {"file": "rpc_rnn/results.py", "program": "rpc_rnn/main.py"}
PREFETCH = {"file": "rpc_rnn/prefetch.py", "program": "rpc_rnn/main.py", "flags": ("--prefetch",)}

MUTANTS = [
    Mutant("state not carried over", **MAIN, check="training, state carried over",
           old="                output, hidden = model(data, hidden)\n",
           new="                output, _ = model(data, hidden)\n"),
    Mutant("state of the last epoch goes on", **MAIN, check="training, state carried over",
           old="hidden, losses, started = model.init_hidden(args.batch_size), [],",
           new="hidden, losses, started = hidden if epoch else model.init_hidden(args.batch_size), [],"),
    Mutant("state not detached", **MAIN, check="error|without history",
           old="hidden = (hidden[0].detach(), hidden[1].detach())", new="hidden = (hidden[0], hidden[1])"),
    Mutant("a plain optimizer", **MAIN, check="weights after each step, LSTM",
           old="                opt.step(context_id)\n",
           new="                optim.SGD(model.parameters(), lr=args.lr).step()\n"),
    Mutant("optimizer does not know the decoder", **MAIN, check="weights after each step, decoder",
           old="        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())\n", new=""),
    Mutant("optimizer made anew in each epoch", **MAIN, check="weights after each step",
           old="        # A seed for the dropout of each epoch",
           new="        opt = DistributedOptimizer(optimizers[args.optimizer], param_rrefs, lr=args.lr)\n"
               "        # A seed for the dropout of each epoch"),
    Mutant("dropout never on", **MAIN, check="training, loss",
           old="set_mode(model, training=True,", new="set_mode(model, training=False,"),
    Mutant("the same masks in every epoch", **MAIN, check="training, loss",
           old="1_000_000 * args.seed + 1000 * epoch", new="1_000_000 * args.seed"),
    Mutant("no dropout before the decoder", **MAIN, check="training, loss",
           old="self.decoder(self.drop(output.to(self.device)))", new="self.decoder(output.to(self.device))"),
    Mutant("dropout off on the trainer only", **EVALUATION, check="validation, loss",
           old="    for rref in (model.emb_table_rref, model.decoder_rref):\n",
           new="    for rref in (model.emb_table_rref, model.decoder_rref) if training else ():\n"),
    Mutant("scores and targets of other tokens", **MAIN, check="training, loss",
           old="criterion(output.flatten(0, 1), target.flatten())",
           new="criterion(output.transpose(0, 1).flatten(0, 1), target.flatten())"),
    Mutant("table and decoder draw alike", **MAIN, check="first weights, independent",
           old="args=(Decoder, ntoken, nhid, dropout, 3 * seed + 2, device)",
           new="args=(Decoder, ntoken, nhid, dropout, 3 * seed, device)"),
    Mutant("the LSTM's seed forgotten", **MAIN, check="first weights, drawn",
           old="        torch.manual_seed(3 * seed + 1)\n", new=""),
    Mutant("targets are the inputs", file="rpc_rnn/data.py", program="rpc_rnn/main.py", check="training, targets",
           old="yield table[start:end], table[start + 1 : end + 1]", new="yield table[start:end], table[start:end]"),
    Mutant("all trainers read the same columns", **MAIN, check="two trainers, training, tokens",
           old="columns(tokens, args.batch_size, rank - 1, n_trainers)",
           new="columns(tokens, args.batch_size, 0, n_trainers)"),
    Mutant("gradients of the tables not averaged", **MAIN, check="two trainers, gradients in the context, table",
           old="                    average_table_gradients(model, context_id)\n", new="                    pass\n"),
    Mutant("gradients of the tables summed", **TRAINERS, check="two trainers, gradients in the context, table",
           old="        first[param] /= len(context_ids)\n", new=""),
    Mutant("nobody waits for the first trainer's step", **MAIN, check="error: rank|two trainers, training, loss",
           old="                    dist.barrier()  #", new="                    pass  #"),
    Mutant("a short last piece counts like the others", **RESULTS, check="metrics, losses of the epochs",
           old="sum(loss * n / rows for loss, n in losses)", new="sum(loss / len(losses) for loss, n in losses)"),
    Mutant("perplexity of the training loss", **RESULTS, check="metrics, loss before and perplexity",
           old='val_loss = epochs[-1]["val_loss"]', new='val_loss = epochs[-1]["loss"]'),
    Mutant("validation counts as training time", **MAIN, check="metrics, steps per second",
           old="        train_s += time.perf_counter() - started\n"
               "        val_loss = evaluate(model, criterion, val_table, args.bptt)\n",
           new="        val_loss = evaluate(model, criterion, val_table, args.bptt)\n"
               "        train_s += time.perf_counter() - started\n"),
    Mutant("look-up before the step", **PREFETCH, check="training, loss",
           old="    optimizer_rref.local_value().step(context_id)\n"
               "    return None if next_tokens is None else look_up(table_rref, next_tokens)\n",
           new="    following = None if next_tokens is None else look_up(table_rref, next_tokens)\n"
               "    optimizer_rref.local_value().step(context_id)\n"
               "    return following\n"),
    Mutant("embeddings of the present piece again", **PREFETCH, check="error|training, loss",
           old="        for piece, (self.next_tokens, _) in itertools.pairwise(pieces):\n",
           new="        for piece, _ in itertools.pairwise(pieces):\n            self.next_tokens = piece[0]\n"),
    Mutant("the first piece of the next epoch before its seed", **PREFETCH, check="training, loss",
           old="[(None, None)]", new="[(table[:bptt], None)]"),
    Mutant("validation reads what the training has prefetched", **PREFETCH, check="error|validation, loss",
           old="        if not torch.is_grad_enabled():  # validation reads other tokens\n"
               "            return self.table_rref.rpc_sync().forward(tokens)\n", new=""),
    Mutant("looked up again in the forward pass", **PREFETCH, check="training, loss",
           old="        if self.embeddings is None:  #", new="        if True:  #"),
    Mutant("the gradient of the embeddings lost", **PREFETCH, check="gradients in the context, table",
           old="    table.embeddings.backward(gradient)\n", new=""),
    Mutant("the gradient of the embeddings twice", **PREFETCH, check="gradients in the context, table",
           old="    table.embeddings.backward(gradient)\n",
           new="    table.embeddings.backward(gradient, retain_graph=True)\n    table.embeddings.backward(gradient)\n"),
    Mutant("gradients of the table add up", **PREFETCH, check="gradients in the context, table",
           old="    table.zero_grad()  #", new="    #"),
    Mutant("the graph of the embeddings cut on the server, too", **PREFETCH, check="error",
           old="    table.embeddings = table(tokens)\n", new="    table.embeddings = table(tokens).detach()\n"),
    Mutant("the trainer's own step forgotten", **PREFETCH, check="weights after each step, LSTM",
           old="        here.local_value().step(context_id)  # meanwhile\n", new=""),
    Mutant("an optimizer that sees no .grad", **MAIN, flags=("--prefetch",), check="weights after each step, table",
           old=" if args.checkpoint or args.prefetch else ", new=" if args.checkpoint else "),
]
