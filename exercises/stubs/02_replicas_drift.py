"""02 離れていくレプリカ / Replicas that drift (6_3, ddp_basic/main.py)."""

import torch


def train(ddp_model: DDP, rank: int, device: torch.device,
          args: argparse.Namespace) -> list[float]:
    """DDPで包まれたモデルを訓練します。どこかに誤りがあります。

    ddp_model: DDPで包まれたモデル。
    rank, device: このランクの番号と、出力のデバイス。
    args: コマンドラインの値。`args.steps`はステップ数、`args.lr`は学習率です。
    `toy_samples(rank, args.seed)`は、このランクのサンプル（入力(n, 10)とラベル(n, 5)）を返します。
    戻り値: このランクの損失のリスト（各ステップの前と、最後）。

    Train a model that is wrapped into DDP. There is a mistake in here.

    ddp_model: the model in DDP.
    rank, device: the number of this rank, and where the outputs are.
    args: the flags, with `args.steps` and the learning rate `args.lr`.
    `toy_samples(rank, args.seed)` gives this rank's samples: inputs (n, 10) and labels (n, 5).
    Returns this rank's losses, a list: before each step, and at the end.
    """
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=args.lr)
    inputs, labels = (tensor.to(device) for tensor in toy_samples(rank, args.seed))
    losses = []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        outputs = ddp_model.module(inputs)
        loss = loss_fn(outputs, labels)
        losses.append(report.require_finite(loss, f"at step {step}"))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = loss_fn(ddp_model.module(inputs), labels)
    return [*losses, report.require_finite(loss, "after the last step")]
