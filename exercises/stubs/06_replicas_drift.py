"""06 離れていくレプリカ / Replicas that drift (6_3, ddp_basic/main.py)."""

import torch


def demo_basic(rank, world_size, args):
    """モデルをDDPで包んで訓練します。どこかに誤りがあります。

    rank, world_size: このランクの番号と、ランクの数。
    args: コマンドラインの値。`args.steps`はステップ数、`args.lr`は学習率です。
    `toy_samples(rank, args)`は、このランクのサンプル（入力(n, 10)とラベル(n, 5)）を返します。
    戻り値: このランクの損失のリスト（各ステップの前と、最後）。

    Wrap a model into DDP, and train it. There is a mistake in here.

    rank, world_size: the number of this rank, and how many there are.
    args: the flags, with `args.steps` and the learning rate `args.lr`.
    `toy_samples(rank, args)` gives this rank's samples: inputs (n, 10) and labels (n, 5).
    Returns this rank's losses, a list: before each step, and at the end.
    """
    device = device_for(args.device)
    torch.manual_seed(args.seed)
    model = ToyModel().to(device)
    ddp_model = DDP(model, device_ids=gpu_of(device))
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args))
    losses = []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_fn(outputs, labels)
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()
        optimizer.step()
    return [*losses, results.loss_on(inputs, labels, model, loss_fn)]
