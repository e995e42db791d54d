"""What a run says of itself: speeds on a clock that is known, exact lines, and pictures that show the numbers of the table."""

import importlib
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from batch_rl import main as batch_rl
from batch_rl import results as batch_rl_results
from batch_rl import until_solved
from ddp_basic import main as ddp_basic
from ddp_basic import results as ddp_basic_results
from ddp_rpc_hybrid import main as hybrid
from ddp_rpc_hybrid import results as hybrid_results
from model_parallel_resnet import main as pipeline
from model_parallel_resnet import results as pipeline_results
from model_parallel_resnet import single_machine_results
from p2p_collectives import ring_allreduce, train, train_results
from p2p_collectives import ring_allreduce_results as ring_results
from param_server import main as param_server
from param_server import results as param_server_results
from rpc_rl import main as rpc_rl
from rpc_rl import results as rpc_rl_results
from rpc_rnn import main as rpc_rnn
from rpc_rnn import results as rpc_rnn_results


@pytest.fixture
def clock(monkeypatch):
    """`clock.now`: what `time.perf_counter` says."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def drawn(monkeypatch):
    """`drawn()`: of each panel of each picture so far, `{label: (x, y)}` of its lines."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or path.touch())
    monkeypatch.setenv("PICTURE_LANGUAGES", "en")

    def lines():
        return [{line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}
                for figure in figures for panel in figure.axes]

    return lines


def args_of(program, folder, *flags):
    return program.build_parser().parse_args(["--output_dir", str(folder), *map(str, flags)])


def last_line(capfd):
    return capfd.readouterr().out.splitlines()[-1]


def test_rpc_rl(clock, drawn, tmp_path, capfd):
    """After a resumed checkpoint: episodes of all, speed of its own."""
    args = args_of(rpc_rl, tmp_path, "--reward_threshold", 20, "--log_interval", 9)
    agent = SimpleNamespace(running_reward=0.0, rewards={1: [1.0] * 40, 2: [1.0] * 60})
    history = rpc_rl_results.History(agent, args)
    history.resume({"episodes": 7, "env_steps": 1000, "running_reward": 19.0, "rewards": [5.0] * 7,
                    "running_rewards": [6.0] * 7})
    assert agent.running_reward == 19
    for reward, running in ((30.0, 19.5), (50.0, 20.5)):
        clock.now, agent.running_reward = clock.now + 4, running
        history.add(reward)
    metrics = history.metrics()
    assert metrics == {"solved": True, "env_steps_per_s": 25.0, "episodes": 9, "env_steps": 1200, "running_reward": 20.5,
                       "rewards": [5.0] * 7 + [30.0, 50.0], "running_rewards": [6.0] * 7 + [19.5, 20.5]}
    agent.running_reward = 20.0
    assert history.metrics()["solved"] is False
    assert capfd.readouterr().out == "[agent] episode 9  last reward 50  running reward 20.50\n"
    rpc_rl_results.finish(metrics, args)
    assert last_line(capfd) == ("CartPole-v1 solved in 9 episodes: running reward 20.5 (threshold 20), "
                                "1200 environment steps at 25 steps/s")
    assert json.loads((tmp_path / "metrics.json").read_text()).items() >= metrics.items()
    [lines] = drawn()
    episodes = list(range(1, 10))
    assert lines["reward of the worst observer"] == (episodes, metrics["rewards"])
    assert lines["running reward"] == (episodes, metrics["running_rewards"])
    assert lines["solved above 20"][1] == [20, 20]


def test_batch_rl(drawn, tmp_path, capfd):
    """Seconds and speeds are medians of episodes."""
    args = args_of(batch_rl, tmp_path, "--observers", 1, 2, "--num_episode", 3)
    timed = {1: {"batched": [(1, 100), (2, 100), (4, 100)], "single": [(2, 100), (4, 100), (5, 100)]},
             2: {"batched": [(1, 300), (1, 200), (1, 100)], "single": [(2, 100), (2, 100), (2, 100)]}}
    metrics = batch_rl_results.finish({n: {"timed": of_run, "wall_s": 9.0} for n, of_run in timed.items()}, args)
    assert metrics["rows"] == [
        {"observers": observers, "envs_per_observer": 1, "mode": mode, "env_steps_per_s": speed}
        for observers, mode, speed in ((1, "batched", 50), (1, "single", 25), (2, "batched", 200), (2, "single", 50))]
    assert metrics["speedup"] == {1: 2, 2: 4}
    assert metrics["wall_s"] == 18
    lines = capfd.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[-3:-1]] == [
        "1 2.00 s 4.00 s 50 /s 25 /s 2.00", "2 1.00 s 2.00 s 200 /s 50 /s 4.00"]
    assert lines[-1] == "2 observers: 200 environment steps/s in batches, 50 one by one: 4.0 times as many"
    assert drawn() == [{"one by one": ([1, 2], [25, 50]), "in batches": ([1, 2], [50, 200])}]


def test_until_solved(clock, drawn, tmp_path, capfd):
    """The steps in which an environment resets itself are none."""
    args = args_of(until_solved, tmp_path, "--reward_threshold", 20)
    none = float("nan")
    agent = SimpleNamespace(running_reward=21.0, returns=torch.tensor([[[1.0, none, 3.0, 4.0], [1.0, 2.0, none, none]]]))
    history = batch_rl_results.History(agent, args)
    clock.now += 2
    history.add(30.0)
    metrics = history.metrics()
    assert metrics == {"solved": True, "episodes": 1, "env_steps": 5, "env_steps_per_s": 2.5, "rewards": [30.0],
                       "running_rewards": [21.0]}
    batch_rl_results.finish_training(metrics, args)
    assert last_line(capfd) == ("CartPole-v1 solved in 1 episodes: running reward 21.0 (threshold 20), "
                                "5 environment steps at 2 steps/s")
    [lines] = drawn()
    assert lines["mean of all environments"] == ([1], [30])
    assert lines["running reward"] == ([1], [21])


def test_training_with_collectives(clock, tmp_path, capfd):
    args = args_of(train, tmp_path, "--epochs", 3)
    laps = train_results.Clock()
    for seconds in (2, 3):
        with laps:
            clock.now += seconds
        clock.now += 50  # the accuracy
    assert (laps.seconds, laps.laps) == (5, 2)
    metrics = {"backend": "gloo", "epochs": [], "test_accuracy": 0.875, "samples": 2000, "train_s": laps.seconds}
    assert train_results.finish(metrics, args)["samples_per_s"] == 400
    assert last_line(capfd) == ("digits: test accuracy 87.5% after 3 epochs on 2 ranks: 400 samples/s, "
                                "weights bitwise identical")


def test_parameter_server(drawn, tmp_path, capfd):
    """From the first start to the last step; the loss of an epoch is that of its steps, whoever made them."""
    args = args_of(param_server, tmp_path)

    def trainer(rank, started, *epochs):
        return {"rank": rank, "started": started, "steps": [
            [{"loss": loss, "samples": 10, "time": moment} for loss, moment in epoch] for epoch in epochs]}

    metrics = param_server_results.finish({"test_accuracy": 0.75, "wall_s": 30.0, "per_trainer": [
        trainer(1, 100.0, [(4.0, 101.0), (2.0, 102.0)], [(1.0, 103.0)]), trainer(2, 99.0, [(3.0, 104.0)], [(2.0, 107.0)]),
    ]}, args)
    assert [epoch["loss"] for epoch in metrics["epochs"]] == [3, 1.5]
    assert (metrics["updates"], metrics["samples_per_s"]) == (5, 50 / 8)
    assert last_line(capfd) == "digits: test accuracy 75.0% after 5 updates by 2 trainers (lock): 6 samples/s"
    [lines] = drawn()
    assert lines == {"trainer1": ([2, 3, 4], [4, 2, 1]), "trainer2": ([5, 8], [3, 2])}


def test_language_model(clock, drawn, tmp_path, capfd):
    """Of a resumed training only the new steps count, and no validation; a loss is that of a token."""
    args = args_of(rpc_rnn, tmp_path, "--epochs", 2, "--bptt", 10)
    history = rpc_rnn_results.History(args, torch.zeros(16, 2), [{"loss": 3.0, "val_loss": 2.5}], 4.0, "trainer", True)
    history.begin_epoch()
    for loss, rows, seconds in ((2.0, 10, 3), (5.0, 5, 1)):
        clock.now += seconds
        history.add(torch.tensor(loss), rows)
    clock.now += 1000  # the validation
    history.end_epoch(1.0)
    history.round_trips = 7
    language = SimpleNamespace(entropy_floor=0.5, floor_without_memory=2.0)
    metrics = rpc_rnn_results.summary(history, None, language, args)
    assert metrics["epochs"] == [{"loss": 3.0, "val_loss": 2.5}, {"loss": 3.0, "val_loss": 1.0}]
    assert metrics["steps_per_s"] == 0.5
    assert metrics["perplexity"] == pytest.approx(2.718281828)
    metrics["steps_per_s"] = 12.0
    rpc_rnn_results.finish(metrics, args)
    assert last_line(capfd) == ("loss 4.00 -> 1.00 (the source's entropy is 0.50) | validation perplexity 2.72 | "
                                "12 steps/s, 7 RPC round trips a step")
    [lines] = drawn()
    assert lines["training"] == ([1, 2], [3, 3])
    assert lines["validation"] == ([0, 1, 2], [4, 2.5, 1])
    assert (lines["entropy of the source: the floor"][1], lines["best without memory"][1]) == ([0.5] * 2, [2] * 2)


def test_hybrid(clock, tmp_path):
    """The accuracy is a share of bags, the bytes a mean of steps."""
    args = args_of(hybrid, tmp_path, "--epochs", 1)
    history = hybrid_results.History("trainer0", args, show=False)
    history.begin_epoch()
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    for loss, right in ((3.0, [1, 0, 1]), (1.0, [0, 0, 0])):
        history.add(torch.tensor(loss), scores, torch.tensor(right), 400)
    clock.now += 8
    history.end_epoch()
    metrics = history.metrics()
    assert metrics["epochs"] == [{"loss": 2.0, "accuracy": 4 / 6}]
    assert metrics["steps_per_s"] == hybrid_results.BATCHES / 8
    assert metrics["bytes_per_step"] == 800 / hybrid_results.BATCHES


def test_skew(drawn, tmp_path, capfd):
    """A step is as long as the slowest rank's."""
    args = args_of(ddp_basic, tmp_path, "--demo", "skew", "--slow_rank", 1, "--delay", 0.5)
    skew = {"step_s": [0.6, 0.7], "even_step_s": [0.2, 0.1], "compute_s": [0.1, 0.6], "wait_s": [0.5, 0.1],
            "spans": [[(0.0, 0.1, 0.6)], [(0.0, 0.6, 0.7)]]}
    ddp_basic_results.finish({"backend": "gloo", "skew": skew}, args)
    assert last_line(capfd) == ("skew on 2 ranks: a step takes 0.700 s where rank 1 takes 0.5 s longer, "
                                "0.200 s where none does")


def test_rings(drawn, tmp_path):
    """A median of rounds, bytes over a link in GB/s (not GiB), and how many times as fast as the library."""
    args = args_of(ring_allreduce, tmp_path, "--sizes", 4_000_000, "--world_size", 4)
    seconds = {"all_reduce": [0.004, 0.002, 0.009], "ring_chunked": [0.001, 0.003, 0.002]}
    rows = ring_results.rows_of(seconds, 4, 4_000_000)
    assert [row["median_s"] for row in rows] == [0.004, 0.002]
    assert [row["bus_GBps"] for row in rows] == pytest.approx([1.5, 3.0])  # 2 * 3 / 4 of 4 MB
    assert [row["vs_all_reduce"] for row in rows] == [1, 2]
    run = {"rows": rows, "world_size": 4, "cpu_count": 2, "device": "cpu", "torch": "2.13.0"}
    ring_results.plot([run], args)
    [lines] = drawn()
    shown = [y for _, y in lines.values()]
    assert [pytest.approx(1.5)] in shown
    assert [pytest.approx(3.0)] in shown


def test_pipeline(tmp_path):
    """Medians, which are no means; the first row is what the others are compared with; idle workers, on average."""
    args = args_of(pipeline, tmp_path, "--num_splits", 1, 2)
    windows = [[(0, 4), (10, 16), (20, 24.4)], [(5, 7), (17, 20), (25, 27.2)]]
    spans = {worker: [{"kind": "forward", "labels": {}, "start": start, "end": start + share * (end - start)}
                      for of_row in windows for start, end in of_row]
             for worker, share in (("worker1", 0.5), ("worker2", 0.3))}
    rows = pipeline_results.rows_of({"windows": windows, "spans": spans}, args, [*spans])
    table = pipeline_results.table(rows)
    assert [" ".join(line.split()) for line in table[1:]] == ["1 4.40 1.00 1.00 60%", "2 2.20 2.00 1.33 60%"]
    line = pipeline_results.last_line(rows, [0.5, 0.25], args, "RPC pipeline")
    for number in ("0.5000", "0.2500", "2.20 s", "2.00 times"):
        assert number in line


def test_single_machine():
    """The tutorial's numbers, of medians: time for model parallel, speed for the two pipelines."""
    rows = [{"model": model, "split_size": size, "micro_batches": n, "times_s": [start, start + 3.0, start + 0.5]}
            for model, size, n, start in (("single device", None, 1, 4.0), ("model parallel", None, 1, 4.4),
                                          ("pipeline", 3, 2, 6.0), ("pipeline", 5, 1, 2.0))]
    single_machine_results.add_averages(rows)
    assert [row["median_s"] for row in rows] == [4.5, 4.9, 6.5, 2.5]
    numbers = single_machine_results.compare_times(rows, 3)
    assert numbers == {"model_parallel_slower": pytest.approx(4.9 / 4.5 - 1), "pipeline_faster": pytest.approx(4.5 / 6.5 - 1),
                       "best_split_size": 5, "best_split_faster": pytest.approx(4.5 / 2.5 - 1)}
    table = [" ".join(line.split()) for line in single_machine_results.table(rows)]
    assert table[0] == "model split size micro-batches median mean deviation median / single's"
    assert table[3] == "pipeline 3 2 6.500 s 7.167 s 1.312 s 1.44"
    line = single_machine_results.last_line(numbers, [0.5, 0.25], [torch.device("cpu")] * 2)
    for words in ("takes +9% time", "pipelined -31% speed", "size 5 with +80% ", "0.500 -> 0.250"):
        assert words in line


DIVERGING = [  # with a learning rate that no training survives
    ("rpc_rl.main", "--max_episodes 9", r"rank 0 \(agent\) has a \w+ of \S+ (after|in) an .*"),
    *(("ddp_basic.main", f"--demo {demo} --delay 0", r"rank \d \(rank\d\) has a loss of (inf|nan) at step [23]")
      for demo in ("basic", "checkpoint", "model_parallel", "skew")),
    ("ddp_basic.elastic", "", r"rank \d \(rank\d\) has a loss of (inf|nan) in epoch 1"),
    ("p2p_collectives.train", "", r"rank \d \(rank\d\) has a .*"),
    ("rpc_rnn.main", "--nhid 8 --optimizer sgd --epochs 1", r"rank 1 \(trainer\) has a .*"),
    ("param_server.main", "--world_size 2 --epochs 2", r"rank 1 \(trainer1\) has a loss of \S+ in epoch 1"),
    ("param_server.batch_update", "--world_size 2 --num_updates 4 --arch resnet18 --image_size 32 --batch_size 4",
     r"rank 1 \(trainer1\) has a loss of (nan|inf) at update \d"),
    *((f"model_parallel_resnet.{name}", "--arch resnet18 --image_size 64 --batch_size 8 --num_splits 1 4 --num_batches 1", ".*")
      for name in ("main", "early_backward", "schedules")),
    ("model_parallel_resnet.single_machine", "--device cpu --batch_size 4 --image_size 33 --num_batches 3", ".*"),
    ("ddp_rpc_hybrid.main", "--epochs 3", ".* has a loss of .*"),
    ("ddp_rpc_hybrid.sharded_table", "--epochs 3", ".*"),
]


@pytest.mark.parametrize(("program", "flags", "who"), DIVERGING)
def test_a_training_that_diverges(program, flags, who, tmp_path, capfd):
    """One line, status 1, and no metrics.json with NaN in it."""
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(program).main([*flags.split(), "--lr", "1e30", "--output_dir", str(tmp_path)])
    assert stop.value.code == 1
    line = rf"error: {who}: training has diverged; give a smaller --lr(; stopped \d other process(es)?)?\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    assert list(tmp_path.iterdir()) == []
