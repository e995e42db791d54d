"""11 動かない損失 / The loss stands still (6_5, rpc_rnn/main.py)."""

from argparse import Namespace

import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from rpc_rnn import results, saving
from rpc_rnn.data import columns, get_next_batch, load_language
from rpc_rnn.main import PS_NAME, Adam, RNNModel


def run_trainer(args: Namespace) -> dict:
    """言語モデルを訓練し、測定値を返します。どこかに誤りがあります。

    `model`のLSTMはこのプロセスに、埋め込みテーブルとデコーダーはサーバー`PS_NAME`にあります。
    `Adam`は、`optim.Adam`と同じように使えます。

    Train the language model, and return the metrics. There is a mistake in here.

    The LSTM of `model` is in this process; the embedding table and the decoder are on the server
    `PS_NAME`. `Adam` is used like `optim.Adam`.
    """
    language = load_language(args)
    train_table, val_table = (columns(tokens, args.batch_size)
                              for tokens in (language.train, language.val))
    model = RNNModel(PS_NAME, language.ntoken, args.ninp, args.nhid, args.nlayers, args.dropout,
                     args.seed, args.device)
    opt = DistributedOptimizer(Adam, model.parameter_rrefs(), lr=args.lr)
    optimizer = Adam(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    epochs, initial_val_loss = (
        saving.restore(model, opt, args) if args.resume
        else ([], results.evaluate(model, criterion, val_table, args.bptt)))
    history = results.History(args, train_table, epochs, initial_val_loss)
    for epoch in range(len(epochs), args.epochs):
        model.set_mode(training=True, seed=1_000_000 * args.seed + 1000 * epoch + 2)
        hidden = model.init_hidden(args.batch_size)
        for data, target in get_next_batch(train_table, args.bptt):
            with history.clock, dist_autograd.context() as context_id:
                hidden[0].detach_()
                hidden[1].detach_()
                output, hidden = model(data, hidden)
                loss = criterion(output.flatten(0, 1), target.flatten())
                dist_autograd.backward(context_id, [loss])
                optimizer.step()
                history.add(loss, len(data))
        history.end_epoch(results.evaluate(model, criterion, val_table, args.bptt))
        saving.save(model, opt, history, language, args)
    return results.summary(history, model, language, args)
