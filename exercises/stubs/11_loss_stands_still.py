"""11 動かない損失 / The loss stands still (6_5, rpc_rnn/main.py)."""

import torch.distributed.autograd as dist_autograd
from torch import nn


def run_trainer(args: Namespace):
    """言語モデルを訓練します。どこかに誤りがあります。

    args: コマンドのフラグ。
    `model`のLSTMはこのプロセスに、埋め込みテーブルとデコーダーはパラメーターサーバー"ps"にあります。
    `get_next_batch`は、テキストの区間（入力と正解）を順に返します。
    戻り値: 測定値の辞書。

    Train the language model. There is a mistake in here.

    args: the flags of the command.
    The LSTM of `model` is in this process, its embedding table and its decoder are on the parameter
    server, "ps". `get_next_batch` yields the pieces of the text, inputs and targets.
    Returns the metrics, a dict.
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
    history = results.History(args, train_table, epochs, initial_val_loss, opt)
    for epoch in range(len(epochs), args.epochs):
        model.set_mode(training=True, seed=1_000_000 * args.seed + 1000 * epoch + 2)
        hidden = model.init_hidden(args.batch_size)
        history.begin_epoch()
        for data, target in get_next_batch(train_table, args.bptt):
            with dist_autograd.context() as context_id:
                hidden[0].detach_()
                hidden[1].detach_()
                output, hidden = model(data, hidden)
                loss = criterion(output.flatten(0, 1), target.flatten())
                dist_autograd.backward(context_id, [loss])
                optimizer.step()
                history.add(loss, len(data), context_id)
        history.end_epoch(results.evaluate(model, criterion, val_table, args.bptt))
        saving.save(model, opt, history, language, args)
    return results.summary(history, model, language, args)
