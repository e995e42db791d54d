"""16 動かない損失 / The loss stands still (6_5, rpc_rnn/main.py)."""

import time

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from common import report
from torch import nn
from torch.distributed.optim import DistributedOptimizer


def run_trainer(rank, world_size, args):
    """言語モデルを訓練します。どこかに誤りがあります。

    rank: このトレーナーのランク（1から）。`model`のLSTMはこのプロセスに、埋め込み表とデコーダーは
        パラメーターサーバー"ps"にあります。
    world_size: プロセスの数。
    args: コマンドのフラグ。
    戻り値: 最初のトレーナーでは測定値の辞書、ほかではNone。

    Train the language model. There is a mistake in here.

    rank: of this trainer, from 1. The LSTM of `model` is in this process, its embedding table and
        its decoder are on the parameter server, "ps".
    world_size: the number of processes.
    args: the flags of the command.
    Returns the metrics, a dict, on the first trainer, None on the others.
    """
    language, n_trainers = load_language(args), world_size - 1
    train_table, val_table = (columns(tokens, args.batch_size, rank - 1, n_trainers)
                              for tokens in (language.train, language.val))
    model = RNNModel("ps", language.ntoken, args.ninp, args.nhid, args.nlayers, args.dropout,
                     args.seed, args.device)
    param_rrefs = model.parameter_rrefs() if rank == 1 else _parameter_rrefs(model.rnn)
    optimizers = saving.OPTIMIZERS_WITH_STATE if args.checkpoint or args.prefetch else OPTIMIZERS
    opt = DistributedOptimizer(optimizers[args.optimizer], param_rrefs, lr=args.lr)
    opt, pieces = prefetch.rung(model, opt) if args.prefetch else (opt, get_next_batch)
    # シングルプロセスの訓練ループと同じオプティマイザー / as in a training loop of one process
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    epochs, initial = saving.restore(model, opt, rank, args) if args.resume else ([], None)
    initial = evaluate(model, criterion, val_table, args.bptt) if initial is None else initial
    resumed, train_s, round_trips = len(epochs), 0.0, None
    n_steps = len(list(get_next_batch(train_table, args.bptt)))
    bar = report.progress(args.epochs * n_steps, "step", resumed * n_steps, show=rank == 1)
    for epoch in range(resumed, args.epochs):
        set_mode(model, training=True, seed=1_000_000 * args.seed + 1000 * epoch, rank=rank)
        hidden, losses, started = model.init_hidden(args.batch_size), [], time.perf_counter()
        for data, target in pieces(train_table, args.bptt):
            with dist_autograd.context() as context_id:
                hidden = (hidden[0].detach(), hidden[1].detach())
                output, hidden = model(data, hidden)
                loss = criterion(output.flatten(0, 1), target.flatten())
                dist_autograd.backward(context_id, [loss])
                if n_trainers > 1:
                    average_table_gradients(model, context_id)
                optimizer.step()
                if n_trainers > 1:
                    dist.barrier()
                round_trips = results.count_round_trips(context_id, opt)
            at = f"at step {len(losses) + 1} of epoch {epoch + 1}"
            losses.append((report.require_finite(loss, at), len(data)))
            bar.update()
        train_s += time.perf_counter() - started
        val_loss = evaluate(model, criterion, val_table, args.bptt)
        epochs.append({"loss": results.mean_loss(losses), "val_loss": val_loss})
        if rank == 1:
            results.log_epoch(role_name(rank, world_size), epochs)
            saving.save(model, opt, epochs, initial, language, args)
    bar.close()
    steps = (args.epochs - resumed) * n_steps
    metrics = results.summary(epochs, initial, language, steps, train_s, round_trips)
    return with_sample(metrics, model, language, args) if rank == 1 else None
