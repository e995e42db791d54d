"""Pictures of several runs of a command: medians with their ranges, in both languages."""

import importlib
import statistics

from common import picture
from common.tracing import record

# Whose `plot` takes all runs. The other pictures are of one run: a timeline, or a training that is
# the same in each run.
FROM_ALL_RUNS = {"batch_rl", "ddp_rpc_hybrid", "latency", "param_server_trainers", "ring_sizes",
                 "rpc_rnn", "shared_memory", "single_machine"}
CONSISTENCY = {2: ("param_server", "param_server_lock"),  # trainers: two commands
               4: ("param_server_4", "param_server_4_lock")}
SMOOTH = 50  # steps of all trainers together
WORDS = {
    "en": {"title": "A parameter server: asynchronous updates, or one trainer at a time",
           "x": "time (s)", "y": "2 trainers: loss (nats)", "y2": "4 trainers: loss (nats)",
           "async": "async", "lock": "lock",
           "speed": "%s: %s samples/s, test accuracy %s", "range": "%s (%s to %s)",
           "several": "{{n}} runs, a line for each; in brackets the range"},
    "ja": {"title": "パラメーターサーバー：非同期の更新と、1トレーナーずつの更新（ロック）",
           "x": "時間（秒）", "y": "トレーナー2個：損失（ナット）",
           "y2": "トレーナー4個：損失（ナット）", "async": "async", "lock": "lock",
           "speed": "%s：%sサンプル/秒、テスト正解率%s", "range": "%s（%s〜%s）",
           "several": "{{n}}回の測定を1本ずつの線で表示（括弧内は範囲）"},
}


def draw(command, runs, folder):
    """Draw the pictures of a command again, from all its runs.

    Args:
        command: as in `HEADLINES`.
        runs: the metrics of each.
        folder: for the pictures.
    """
    name, flags = program_of(command)
    parser = importlib.import_module(name).build_parser()
    drawing_of(command).plot(runs, parser.parse_args([*flags, "--output_dir", str(folder)]))


def program_of(command):
    """The module, `rpc_rnn.main`, and the flags of a command."""
    path, *flags = command.removeprefix("-m ").split()
    return path.removesuffix(".py").replace("/", "."), flags


def drawing_of(command):
    """The module that draws: a benchmark itself, or the results of a lesson's program."""
    name, _ = program_of(command)
    return importlib.import_module(name) if command.startswith("-m ") else record.results_of(name)


def draw_consistency(runs, path):
    """Draw the loss over time of asynchronous and of locked updates.

    Args:
        runs: `{name: metrics of each run}`, of the names in `CONSISTENCY`.
        path: of the English PNG.
    """
    first = runs[CONSISTENCY[2][0]]
    for panels, words in picture.in_each_language(path, WORDS, first, panels=2, height=6):
        for axes, names in zip(panels, CONSISTENCY.values(), strict=True):
            lines = []
            for colour, name in zip(("C0", "C1"), names, strict=True):
                consistency = runs[name][0]["consistency"]
                for number, run in enumerate(runs[name]):
                    axes.plot(*loss_over_time(run), color=colour, linewidth=1, alpha=0.8,
                              label=words[consistency] if number == 0 else None)
                speed, accuracy = (in_words([run[key] for run in runs[name]], form, words)
                                   for key, form in (("samples_per_s", ",.0f"),
                                                     ("test_accuracy", ".1%")))
                lines.append(words["speed"] % (words[consistency], speed, accuracy))
            axes.text(0.99, 0.95, "\n".join(lines), transform=axes.transAxes, ha="right", va="top",
                      fontsize=9, linespacing=1.6)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)


def loss_over_time(run):
    """Seconds since the first trainer's start, and the mean of the last `SMOOTH` steps' losses."""
    zero = min(trainer["started"] for trainer in run["per_trainer"])
    steps = sorted((time - zero, loss) for trainer in run["per_trainer"]
                   for time, loss in zip(trainer["times"], sum(trainer["losses"], []), strict=True))
    n = min(SMOOTH, len(steps))
    means = [statistics.fmean(loss for _, loss in steps[end - n : end])
             for end in range(n, len(steps) + 1)]
    return [time for time, _ in steps[n - 1 :]], means


def in_words(numbers, form, words):
    """A median with its range."""
    shown = tuple(format(of(numbers), form) for of in (statistics.median, min, max))
    return shown[0] if len(numbers) == 1 else words["range"] % shown
