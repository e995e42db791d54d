"""What a run says of itself: speeds on a clock that is known, exact lines, and pictures that show the numbers of the table."""

import importlib
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from batch_rl import main as batch_rl
from batch_rl import results as batch_rl_results
from batch_rl import until_solved
from ddp_basic import elastic, pitfalls, skew, skew_results
from ddp_rpc_hybrid import main as hybrid
from ddp_rpc_hybrid import results as hybrid_results
from ddp_rpc_hybrid import sharded_table, sharded_table_results
from model_parallel_resnet import main as pipeline
from model_parallel_resnet import results as pipeline_results
from model_parallel_resnet import single_machine_results
from p2p_collectives import init_methods, ring_allreduce, shared_memory, train, train_results
from p2p_collectives import main as collectives
from p2p_collectives import results as collectives_results
from p2p_collectives import ring_allreduce_results as ring_results
from p2p_collectives import shared_memory_results as shared_results
from p2p_collectives.check import single_process
from param_server import async_server, batch_update, batch_update_results
from param_server import main as param_server
from param_server import results as param_server_results
from rpc_rl import main as rpc_rl
from rpc_rl import results as rpc_rl_results
from rpc_rnn import main as rpc_rnn
from rpc_rnn import results as rpc_rnn_results
from tests.helpers import args_of, slow_but
from transformer_parallel import experts, zero
from transformer_parallel import results as transformer_results


@pytest.fixture
def clock(monkeypatch):
    """`clock.now`: what `time.perf_counter` says."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def drawn(monkeypatch):
    """`drawn()`: of each panel of each picture so far, `{label: (x, y)}` of its lines, and of the tops of its bars."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or path.touch())
    monkeypatch.setenv("PICTURE_LANGUAGES", "en")

    def of_panel(panel):
        shown = {}  # under one label, one behind the other
        for line in panel.lines:
            x, y = shown.setdefault(line.get_label(), ([], []))
            x += list(line.get_xdata())
            y += list(line.get_ydata())
        for bars in panel.containers:
            for bar in bars.patches if hasattr(bars, "patches") else ():
                x, y = shown.setdefault(bars.get_label(), ([], []))
                x.append(bar.get_x() + bar.get_width() / 2)
                y.append(bar.get_y() + bar.get_height())
        return shown

    return lambda: [of_panel(panel) for figure in figures for panel in figure.axes]


def last_line(capfd):
    return lines_of(capfd)[-1]


def lines_of(capfd):
    """What was printed, line by line, without the spaces of its columns."""
    return [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]


def about(*numbers):
    return pytest.approx(list(numbers))


def test_rpc_rl(clock, drawn, tmp_path, capfd):
    """After a resumed checkpoint: episodes of all, speed of its own."""
    args = args_of(rpc_rl, tmp_path, "--reward_threshold", 20, "--log_interval", 9)
    agent = SimpleNamespace(running_reward=19.0, rewards={1: [1.0] * 40, 2: [1.0] * 60})
    history = rpc_rl_results.History(agent, args, {
        "episodes": 7, "env_steps": 1000, "running_reward": 19.0, "rewards": [5.0] * 7, "running_rewards": [6.0] * 7})
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
    assert lines_of(capfd)[-3:] == [
        "1 2.00 s 4.00 s 50 /s 25 /s 2.00", "2 1.00 s 2.00 s 200 /s 50 /s 4.00",
        "2 observers: 200 environment steps/s in batches, 50 one by one: 4.0 times as many"]
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


def test_training_with_collectives(tmp_path, capfd):
    args = args_of(train, tmp_path, "--epochs", 3)
    metrics = {"backend": "gloo", "epochs": [], "test_accuracy": 0.875, "samples": 2000, "train_s": 5}
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


def test_language_model(clock, drawn, tmp_path, capfd, monkeypatch):
    """Of a resumed training only the new steps count, and no validation; a loss is that of a token."""
    args = args_of(rpc_rnn, tmp_path, "--epochs", 2, "--bptt", 10)
    monkeypatch.setattr("torch.distributed.rpc.get_worker_info", lambda: SimpleNamespace(id=1, name="trainer"))
    monkeypatch.setattr(rpc_rnn_results.History, "count_round_trips", lambda self, n: setattr(self, "round_trips", n))
    history = rpc_rnn_results.History(args, torch.zeros(16, 2), [{"loss": 3.0, "val_loss": 2.5}], 4.0, None)
    history.begin_epoch()
    for loss, rows, seconds in ((2.0, 10, 3), (5.0, 5, 1)):
        clock.now += seconds
        history.add(torch.tensor(loss), rows, 7)
    clock.now += 1000  # the validation
    history.end_epoch(1.0)
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
        history.add(torch.tensor(loss), scores, torch.tensor(right), torch.zeros(10, dtype=torch.int64))
    clock.now += 8
    history.end_epoch()
    metrics = history.metrics()
    assert metrics["epochs"] == [{"loss": 2.0, "accuracy": 4 / 6}]
    assert metrics["steps_per_s"] == hybrid_results.BATCHES / 8
    # Of a step 10 indices, 3 offsets; 3 sums and their gradients.
    assert metrics["bytes_per_step"] == 2 * (8 * 13 + 4 * 2 * 3 * args.embedding_dim) / hybrid_results.BATCHES


def test_skew(drawn, tmp_path, capfd):
    """A step is as long as the slowest rank's."""
    args = args_of(skew, tmp_path, "--slow_rank", 1, "--delay", 0.5)
    metrics = {"backend": "gloo", "step_s": [0.6, 0.7], "even_step_s": [0.2, 0.1], "compute_s": [0.1, 0.6], "wait_s": [0.5, 0.1],
               "spans": [[(0.0, 0.1, 0.6)], [(0.0, 0.6, 0.7)]]}
    skew_results.finish(metrics, args)
    assert last_line(capfd) == ("skew on 2 ranks: a step takes 0.700 s where rank 1 takes 0.5 s longer, "
                                "0.200 s where none does")
    [bars] = drawn()
    # The middles of rank 0's.
    assert bars["forward and extra work"][0] == about(0.05)
    assert bars["backward(): mostly waiting for the others"][0] == about(0.35)


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


HISTORY = [{"loss": 3.0, "accuracy": 0.25}, {"loss": 2.5, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.75}]


def test_hybrid_of_all_trainers(drawn, tmp_path, capfd):
    """Means of the trainers; a picture in percent."""
    args = args_of(hybrid, tmp_path, "--world_size", 4, "--num_classes", 5)
    other = [{"loss": epoch["loss"] + 1, "accuracy": epoch["accuracy"] - 0.25} for epoch in HISTORY]
    metrics = hybrid_results.over_trainers([
        {"epochs": epochs, "steps_per_s": speed, "bytes_per_step": 11 * speed, "table_gradient_bytes": 4}
        for epochs, speed in ((HISTORY, 100.0), (other, 300.0))])
    hybrid_results.finish(metrics, args)
    assert last_line(capfd) == ("2 trainers: loss 3.50 -> 1.50, accuracy 12% -> 62% (chance 20%) | "
                                "200 steps/s per trainer, 2.2 kB a step")
    losses, accuracies = drawn()
    assert losses == {"training loss": ([1, 2, 3], [3.5, 3.0, 1.5])}
    assert accuracies == {"accuracy on new batches": ([1, 2, 3], [12.5, 37.5, 62.5]),
                          "guessing among 5 classes": ([0, 1], [20, 20])}


def test_sharded_table(drawn, tmp_path, capfd):
    """Of the table, the largest part."""
    args = args_of(sharded_table, tmp_path, "--world_size", 2)
    metrics = sharded_table_results.over_trainers([
        {"epochs": HISTORY, "steps_per_s": speed, "bytes_per_step": 1000.0, "table_bytes": 4000 * part,
         "table_gradient_bytes": 100 * part} for speed, part in ((100.0, 1), (300.0, 2))])
    assert (metrics["table_bytes"], metrics["table_gradient_bytes"]) == (8000, 200)
    sharded_table_results.finish({**metrics, "backend": "gloo"}, args)
    assert last_line(capfd) == ("2 trainers, all_to_all: loss 3.00 -> 1.00, accuracy 25% -> 75% (chance 12%) | "
                                "200 steps/s per trainer, 1.0 kB a step, 8.0 kB of the table each")
    losses, accuracies = drawn()
    assert losses["training loss"] == ([1, 2, 3], [3, 2.5, 1])
    assert accuracies["accuracy on new batches"] == ([1, 2, 3], [25, 50, 75])


def test_elastic(tmp_path, capfd):
    args = args_of(elastic, tmp_path, "--world_size", 3)
    elastic.finish({"backend": "gloo", "history": HISTORY, "attempts": 2, "test_accuracy": 0.875, "loss": 1.25}, args)
    assert last_line(capfd) == "3 epochs on 3 ranks: test accuracy 87.5%, loss 1.250, attempt 2"


def test_pitfalls(tmp_path, capfd):
    """Means of the ranks, one of which has a step more."""
    args = args_of(pitfalls, tmp_path, "--kind", "uneven", "--mended")
    pitfalls.finish({"backend": "gloo", "losses": [[3.0, 1.0], [5.0, 4.0, 2.0]]}, args)
    assert lines_of(capfd) == [
        "[rank0] loss on the samples of rank 0: 3.000 -> 1.000, 2 steps",
        "[rank0] loss on the samples of rank 1: 5.000 -> 2.000, 3 steps", "uneven, mended, on 2 ranks: loss 4.000 -> 1.500"]


def test_batched_updates(drawn, tmp_path, capfd):
    """An update is as long as its slowest trainer's; bytes both ways, of all trainers; shares of medians."""
    args = args_of(batch_update, tmp_path, "--world_size", 3, "--arch", "resnet18")

    def update(loss, computed, ended):
        return {"loss": loss, "started": 10.0, "computed": 10 + computed, "ended": 10 + ended}

    trainers = [{"peak_memory": 1e9, "updates": [update(4.0, 2.0, 5.0), update(2.0, 1.0, 3.0), update(1.0, 1.0, 9.0)]},
                {"peak_memory": 2e9, "updates": [update(2.0, 1.0, 6.0), update(1.0, 1.0, 2.0), update(0.0, 3.0, 5.0)]}]
    measured = {"trainers": trainers, "waits": [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]], "peak_memory": 3e9,
                "model_bytes": 5e6, "wall_s": 1.0}
    metrics = batch_update_results.finish(measured, args)
    expected = {"updates": [6, 3, 9], "compute": [1.5, 1, 2], "waiting": [0.5, 0.5, 0], "transfer": [3.5, 1, 5],
                "median_update_s": 6, "loss": [3, 1.5, 0.5], "bytes_per_update": 20e6, "peak_memory_gb": 6}
    assert metrics.items() >= expected.items()
    assert lines_of(capfd) == [
        "[parameter_server] an update is compute 27%, transfer 64%, waiting 9%; peak memory of all processes 6.0 GB",
        "resnet18, 2 trainers: 6.0 s per update in the median, 20 MB each; loss 3.000 -> 0.500"]
    assert drawn() == [{"compute": ([1, 2, 3], [1.5, 1, 2]), "transfer": ([1, 2, 3], [5, 2, 7]),
                        "waiting for the others": ([1, 2, 3], [5.5, 2.5, 7])}]


def test_staleness(drawn, tmp_path):
    """The ages have become texts on their way; two trainers share the width of an age."""
    args = args_of(async_server, tmp_path)
    metrics = param_server_results.finish({"test_accuracy": 0.75, "wall_s": 30.0, "per_trainer": [
        {"rank": rank, "started": 0.0, "steps": [[{"loss": 1.0, "samples": 1, "time": 1.0}]], "staleness": ages}
        for rank, ages in ((1, {"0": 3, "10": 1}), (2, {"2": 4}))]}, args)
    assert metrics["staleness"] == {"histogram": {"0": 3, "2": 4, "10": 1}, "mean": 18 / 8, "max": 10}
    _, bars = drawn()
    assert bars == {"trainer1": (about(-0.2, 9.8), [3, 1]), "trainer2": (about(2.2), [4])}


def test_shared_memory(drawn, tmp_path, capfd):
    """Two barriers of 20 us, memory with 8 GB/s: the model finds them; smaller tensors are none of it."""
    sizes = 2**16, 2**20, 2**22
    args = args_of(shared_memory, tmp_path, "--world_size", 2, "--sizes", *sizes)
    took = {2**16: 9.0, **{size: 40e-6 + 4 * size / 8e9 for size in sizes[1:]}}
    metrics = shared_results.finish({"ranks_per_machine": 2, "rows": [
        row for collective in shared_results.COLLECTIVES for size in sizes for row in shared_results.rows_of(
            collective, {"gloo": [4 * took[size], 2 * took[size], took[size]], "shared_memory": [took[size]] * 3,
                         "shared_memory_copied": [8 * took[size]]}, 2, size)]}, args)
    assert (metrics["barrier_s"], metrics["memory_GBps"]) == (pytest.approx(20e-6), pytest.approx(8))
    lines = lines_of(capfd)
    assert lines[1] == "size collective way median gloo = 1"
    assert lines[8:11] == ["4 MiB all_reduce gloo 4.27 ms 1.00", "4 MiB all_reduce shared_memory 2.14 ms 2.00",
                           "4 MiB all_reduce shared_memory_copied 17.10 ms 0.25"]
    assert lines[-3].endswith("above 128 KiB: barrier 20 us, memory 8.0 GB/s")
    assert lines[-1] == "4 MiB on 2 ranks: all_reduce by shared_memory takes 2.14 ms, 2.00 times as fast as gloo"
    for lines in drawn():
        assert lines == {"gloo": (list(sizes), [1] * 3), "shared memory": (list(sizes), [2] * 3),
                         "shared memory, copied there and back": (list(sizes), [0.25] * 3)}


def test_model_of_rings(drawn, tmp_path, capfd):
    """100 us a message, 2 GB/s over a link: the model finds them."""
    sizes = 2**20, 2**22
    args = args_of(ring_allreduce, tmp_path, "--world_size", 4, "--sizes", *sizes)
    took = {size: 6 * (100e-6 + size / 4 / 2e9) for size in sizes}
    metrics = ring_results.finish({"rows": [row for size in sizes for row in ring_results.rows_of(
        {"all_reduce": [2 * took[size]], "ring_naive": [5 * took[size]], "RingAllReduce": [took[size]]}, 4, size)]}, args)
    assert (metrics["alpha_s"], metrics["beta_GBps"]) == (pytest.approx(100e-6), pytest.approx(2))
    *_, first, second, third, _, model, _, last = lines_of(capfd)
    assert first == "4 MiB all_reduce 7.49 ms 0.840 1.00"
    assert second == "4 MiB ring_naive 18.73 ms 0.336 0.40"
    assert third == "4 MiB RingAllReduce 3.75 ms 1.680 2.00"
    assert model.endswith("alpha 100 us a message, beta 2.00 GB/s")
    assert last == ("4 MiB on 4 ranks: RingAllReduce takes 3.75 ms, 2.00 times as fast as all_reduce, "
                    "5.0 times as fast as ring_naive")
    [lines] = drawn()
    assert lines["RingAllReduce"][1] == about(*(1.5 * size / took[size] / 1e9 for size in sizes))
    x, y = lines["model of RingAllReduce"]
    assert [x[0], x[-1]] == about(*sizes)
    assert [y[0], y[-1]] == about(*lines["RingAllReduce"][1])  # it is that line, at both ends


def test_pipeline_picture(drawn, tmp_path):
    """Times over those with one split: here, at best, and in the tutorial."""
    args = args_of(pipeline, tmp_path)
    rows = [{"num_split": n, "median_s": seconds, "speedup": 8 / seconds, "ideal": 2 * n / (n + 1)}
            for n, seconds in ((1, 8.0), (2, 5.0), (4, 4.0))]
    pipeline_results.plot([{"rows": rows, "cpu_count": 2, "device": "cpu", "torch": "2.13.0"}], args)
    [lines] = drawn()
    assert lines["here (RPC pipeline)"] == ([1, 2, 4], about(1, 0.625, 0.5))
    assert lines["ideal: (m + 1) / 2m"] == ([1, 2, 4], about(1, 0.75, 0.625))
    assert lines["the tutorial (two GPUs, start-up included)"] == ([1, 2, 4, 8], about(1, *(
        seconds / 16.45 for seconds in (12.33, 10.16, 9.08))))


def way_of(losses, seconds, waited, sent, held, **figures):
    """What a rank has measured of a way; `seconds` of the steps between the first and the last."""
    return {"losses": losses, "seconds": [9.0, *seconds, 8.0], "waited": [9.0, *waited, 8.0], "sent": sent,
            "calls": {name: n // 1000 for name, n in sent.items()}, "held": held, "figures": figures}


def test_transformer(tmp_path, capfd):
    """What the rank sends that sends most, what each kind takes where it is most; the steps but the first and the last."""
    args = args_of(zero, tmp_path, "--world_size", 2, "--blocks", 1)
    each = [way_of([4.0, 2.0], [0.25, 0.5, 0.125], [0.002, 0.004, 0.003], {"all_reduce": 1000}, {
                "weights": 4e6, "state": 1e6}, dropped=3, bubble=0.5),
            way_of([4.0, 3.0], [9.0] * 3, [9.0] * 3, {"all_reduce": 52000, "send": 2000}, {
                "weights": 2e6, "state": 3e6}, dropped=1234, bubble=0.25)]
    ring = [way_of([4.0, 1.5], [0.25, 0.5], [0.0, 0.0], {}, {"weights": 1e6, "state": 0}, dropped=0)] * 2
    expected = [
        {"way": "each", "losses": [4, 2], "calls": {"all_reduce": 52, "send": 2}, "sent_mb": 0.054, "step_ms": 250,
         "waited_ms": 3, "held_mb": {"weights": 4, "state": 3}, "figures": {"dropped": 1234, "bubble": 0.5}},
        {"way": "ring", "losses": [4, 1.5], "calls": {}, "sent_mb": 0, "step_ms": 375, "waited_ms": 0,
         "held_mb": {"weights": 1, "state": 0}, "figures": {"dropped": 0}}]
    measured = {"each": each, "ring": ring}
    metrics = transformer_results.finish({"backend": "gloo", "measured": measured}, args)
    assert metrics["rows"] == expected
    assert lines_of(capfd)[1:] == [
        "sent weights state dropped bubble a step waiting loss",
        "each 0.05 MB 4.00 MB 3.00 MB 1,234 0.5 250 ms 3 ms 2.0000 52 all_reduce, 2 send",
        "ring 0.00 MB 1.00 MB 0.00 MB 0 - 375 ms 0 ms 1.5000 nothing sent",
        "", "278,640 parameters on 2 ranks: the last losses of each, ring differ by 5e-01"]
    assert [transformer_results.median_ms(seconds) for seconds in ([0.5], [9.0, 0.5])] == [500, 500]  # none between


def test_experts(tmp_path, capfd):
    """A line for each block, behind those of the other programs; all experts are counted."""
    args = args_of(experts, tmp_path, "--world_size", 2, "--blocks", 2, "--experts", 3)
    ranks = [way_of([1.0], [], [], {}, {"weights": 1e6}, dropped=1, tokens=[[5, 0, 7], [1, 2, 9]])] * 2
    metrics = experts.finish({"backend": "gloo", "measured": {"replicas": ranks}}, args)
    whole = experts.Transformer(experts.Shape(blocks=2))
    # Of each block, two MLPs more than it had, and the router.
    assert metrics["parameters"] == sum(map(torch.numel, whole.parameters())) + 2 * (2 * 166_608 + 144 * 3)
    assert lines_of(capfd)[-2:] == ["tokens that wanted each expert of block 0: 5 0 7",
                                    "tokens that wanted each expert of block 1: 1 2 9"]


# --- verdicts: what is wrong on the last rank, in the last number, is wrong


def operations_of(world_size, wrong=""):
    """Metrics of main.py; the last rank has another last number than `wrong` should give."""
    operations = [{"demo": demo, "operation": name, "says": "...", "rows": [[*row] for row in rows]}
                  for demo, of_demo in single_process(world_size).items() for name, rows in of_demo.items()]
    for operation in operations:
        before, after = operation["rows"][-1]
        if operation["operation"] == wrong:
            operation["rows"][-1] = [before, [*after[:-1], after[-1] + 1]]
    return {"backend": "gloo", "operations": operations}


def test_operations(tmp_path, capfd):
    args = args_of(collectives, tmp_path, "--world_size", 3)
    collectives_results.finish(operations_of(3), args)
    lines = lines_of(capfd)
    assert lines[-1] == "19 operations on 3 ranks over gloo: every rank holds what it should"
    at = lines.index("all_gather: ...")
    assert lines[at + 1 : at + 5] == ["rank before after expected", *(f"{rank} {10 * rank} 0 10 20 0 10 20 ok" for rank in range(3))]
    for wrong in ("all_gather", "broadcast in evens, odds"):
        with pytest.raises(SystemExit, match="^1$"):
            collectives_results.finish(operations_of(3, wrong), args)
        lines = lines_of(capfd)
        assert lines[-1] == f"19 operations on 3 ranks over gloo: WRONG: {wrong}"
        assert [line.split()[0] for line in lines if line.endswith("FAIL")] == ["2"]


def test_meetings(tmp_path, capfd):
    args = args_of(init_methods, tmp_path)

    def finish(*last):
        sums = {method: [6.0, 6.0, total] for method, total in zip(init_methods.METHODS, last, strict=False)}
        init_methods.finish({"meetings": [{"method": method, "ranks": [
            {"rank": rank, "knew": "...", "sum": total} for rank, total in enumerate(of_ranks)]}
            for method, of_ranks in sums.items()]}, args)

    finish(6.0, 6.0, 6.0)
    assert last_line(capfd) == "env, tcp, file: 3 ranks found each other 3 times, and their sum is 6 each time"
    finish(6.0)
    assert last_line(capfd) == "env: 3 ranks found each other once, and their sum is 6"
    with pytest.raises(SystemExit, match="^1$"):
        finish(6.0, 6.0, 5.0)
    assert last_line(capfd).startswith("WRONG: the sums should be 6: ")


def test_a_wrong_last_number_is_not_timed():
    """Of a whole tensor; of the slice of the last rank; of what the last rank has brought."""
    numbers = torch.arange(8.0)
    scattered = torch.cat([torch.zeros(4), 2 * numbers[4:] + 1])
    gathered = torch.cat([numbers[:4], numbers[4:] + 1])
    for right, require in (
            (2 * numbers + 1, lambda tensor: ring_results.require_sum("ring_naive", tensor, 2)),
            *((right, lambda tensor, name=name: shared_results.require_right(name, "ring", tensor, 1, 2))
              for name, right in (("all_reduce", 2 * numbers + 1), ("reduce_scatter", scattered), ("all_gather", gathered)))):
        require(right)
        right[-1] += 1
        with pytest.raises(ArithmeticError, match=r"32 B( wrongly)?$"):
            require(right)


def test_replicas_drift_apart_in_their_last_parameter(monkeypatch):
    """On this rank, or on another one, which says so in the all_reduce."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    rank0s = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.copy_(rank0s[: len(tensor)]))
    monkeypatch.setattr(dist, "all_reduce", lambda equal, op: None)
    train_results.require_equal_weights(net)
    monkeypatch.setattr(dist, "all_reduce", lambda equal, op: equal.mul_(op != dist.ReduceOp.MIN))
    with pytest.raises(ArithmeticError, match="drifted apart"):
        train_results.require_equal_weights(net)
    monkeypatch.setattr(dist, "all_reduce", lambda equal, op: None)
    with torch.no_grad():
        net[-1].bias[-1].add_(1e-6)
    with pytest.raises(ArithmeticError, match="drifted apart"):
        train_results.require_equal_weights(net)


DIVERGING = [  # with a learning rate that no training survives
    ("rpc_rl.main", "--max_episodes 9", r"rank 0 \(agent\) has a \w+ of \S+ (after|in) an .*"),
    *((f"ddp_basic.{program}", flags, r"rank \d \(rank\d\) has a loss of (inf|nan) at step [23]") for program, flags in (
        ("main", "--demo basic"), ("main", "--demo checkpoint"), ("main", "--demo model_parallel"), ("skew", "--delay 0"))),
    ("ddp_basic.elastic", "", r"rank \d \(rank\d\) has a loss of (inf|nan) in epoch 1"),
    ("p2p_collectives.train", "", r"rank \d \(rank\d\) has a .*"),
    ("rpc_rnn.main", "--nhid 8 --epochs 1", r"rank 1 \(trainer\) has a .*"),
    ("param_server.main", "--world_size 2 --epochs 2", r"rank 1 \(trainer1\) has a loss of \S+ in epoch 1"),
    ("param_server.batch_update", "--world_size 2 --num_updates 4 --arch resnet18 --image_size 32 --batch_size 4",
     r"rank 1 \(trainer1\) has a loss of (nan|inf) at update \d"),
    *((f"model_parallel_resnet.{name}", "--arch resnet18 --image_size 64 --batch_size 8 --num_splits 1 4 --num_batches 1", ".*")
      for name in ("main", "schedules")),
    ("model_parallel_resnet.single_machine", "--device cpu --batch_size 4 --image_size 33 --num_batches 3", ".*"),
    ("ddp_rpc_hybrid.main", "--epochs 3", ".* has a loss of .*"),
    ("ddp_rpc_hybrid.sharded_table", "--epochs 3", ".*"),
]


@pytest.mark.parametrize(("program", "flags", "who"), slow_but(
    DIVERGING, "ddp_basic.main", "rpc_rnn.main", "model_parallel_resnet.single_machine"))
def test_a_training_that_diverges(program, flags, who, tmp_path, capfd):
    """One line, status 1, and no metrics.json with NaN in it."""
    with pytest.raises(SystemExit, match="^1$"):
        importlib.import_module(program).main([*flags.split(), "--lr", "1e30", "--output_dir", str(tmp_path)])
    line = rf"error: {who}: training has diverged; give a smaller --lr(; stopped \d other process(es)?)?\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    assert list(tmp_path.iterdir()) == []
