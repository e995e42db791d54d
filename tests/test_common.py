"""The helpers in common/: data, sessions, comparisons, speeds and metrics, pictures."""

import gzip
import hashlib
import importlib
import json
import math
import os
import string
import time
from pathlib import Path
from types import SimpleNamespace

from common import ROOT, cli, data, picture, report
from common.data import fetch_data, load_data
from common.launch import launch
from common.lessons import lessons
from common.oracle import Comparison, verdict
from common.program import role_name
from common.session import device_for, wait_all
from common.vision import import_torchvision

import numpy as np
import pytest
import torch

from tests.helpers import write_mnist

quick = pytest.mark.quick
MACHINE = {"cpu_count": 2, "device": "cpu", "torch": "2.13.0+cpu"}
WORDS = {"en": {"title": "Loss of {n}", "x": "epoch", "y": "loss (nats)", "mean": "their mean"},
         "ja": {"title": "{n}個の損失", "x": "エポック", "y": "損失（ナット）", "mean": "平均"}}


def test_groups_are_kept(request):
    """With some versions, pytest-xdist forgets them and says nothing: what must run in turns (tests/conftest.py) would not."""
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@test_common.py")


# --- data


def test_digits():
    train, test = load_data(SimpleNamespace(dataset="digits", data_dir=None))
    images, labels = train.tensors
    assert (len(train), len(test)) == (1437, 360)
    assert images.shape == (1437, 1, 28, 28)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)
    for part in (train, test):  # stratified: each digit has its tenth
        shares = part.tensors[1].bincount(minlength=10) / len(part)
        assert shares.numpy() == pytest.approx(0.1, abs=0.005)
    again, _ = load_data(SimpleNamespace(dataset="digits", data_dir=None))
    assert torch.equal(again.tensors[0], images)
    seen = {tuple(image.flatten().tolist()) for image in images}
    assert not any(tuple(image.flatten().tolist()) in seen for image in test.tensors[0])


def test_mnist_that_is_there(tmp_path):
    write_mnist(tmp_path, {"train": 30, "t10k": 10})
    args = SimpleNamespace(dataset="mnist", data_dir=tmp_path)
    fetch_data(args)
    train, test = load_data(args)
    assert train.tensors[1].tolist() == 3 * list(range(10))
    assert test.tensors[1].tolist() == list(range(10))
    # The bytes of the file, row by row; the test set in the units of the training set.
    pixels = np.arange(30 * 28 * 28).reshape(30, 1, 28, 28) % 256 / 255
    normalised = (pixels - pixels.mean()) / pixels.std(ddof=1)
    assert train.tensors[0].numpy() == pytest.approx(normalised, abs=1e-4)
    assert test.tensors[0].numpy() == pytest.approx(normalised[:10], abs=1e-4)


def packed_mnist(folder, monkeypatch):
    """The four .gz of a small MNIST, as a user places them, and a torchvision that knows their checksums."""
    raw, resources = write_mnist(folder, {"train": 30, "t10k": 10}), []
    for path in sorted(raw.iterdir()):
        packed = path.with_name(f"{path.name}.gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        resources.append((packed.name, hashlib.md5(packed.read_bytes()).hexdigest()))
        path.unlink()
    mnist = import_torchvision().datasets.MNIST
    monkeypatch.setattr(mnist, "resources", resources)
    monkeypatch.setattr(mnist, "mirrors", ["http://127.0.0.1:9/"])  # nobody answers
    return raw


def test_mnist_that_was_placed_by_hand(tmp_path, monkeypatch, capsys):
    """If a file is broken, one line has it, the whole cause, the folder, the names of all four."""
    raw, args = packed_mnist(tmp_path, monkeypatch), SimpleNamespace(dataset="mnist", data_dir=tmp_path)
    whole = (broken := raw / "t10k-images-idx3-ubyte.gz").read_bytes()
    broken.write_bytes(b"half")
    with pytest.raises(SystemExit, match="^2$"):
        fetch_data(args)
    (line,) = capsys.readouterr().err.splitlines()
    assert "Connection refused" in line
    assert all(str(words) in line for words in (raw, broken.name, *data.FILES))
    broken.write_bytes(whole)
    fetch_data(args)
    assert load_data(args)[0].tensors[1].tolist() == 3 * list(range(10))


class SlowMNIST:
    """Like torchvision's, with a server that takes a second for every file."""

    def __init__(self, root, train=True, download=False):
        path = Path(root, "MNIST", "raw", f"{'train' if train else 't10k'}-images-idx3-ubyte")
        if download:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                for number in range(10):
                    file.write(bytes([number]) * 28 * 28)
                    time.sleep(0.1)
        pixels = bytearray(path.read_bytes())
        self.data = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 28, 28)
        self.targets = torch.arange(len(self.data))


def fetch_and_load(rank, world_size, args):
    """On first use, all at the same time; what each rank has loaded is in a file."""
    data.import_torchvision = lambda: SimpleNamespace(datasets=SimpleNamespace(MNIST=SlowMNIST))
    fetch_data(args)
    shapes = [list(half.tensors[0].shape) for half in load_data(args)]
    (args.output_dir / f"rank{rank}").write_text(str(shapes))


def test_one_process_of_each_machine_fetches(tmp_path):
    """Under torchrun, the others wait until the first one has all files: nobody reads half of one."""
    parser = cli.Parser("test", "", world_size=2)
    data.add_data_flags(parser)
    folder = tmp_path / "data"
    flags = ["--dataset", "mnist", "--data_dir", str(folder), "--output_dir", str(tmp_path / "out")]
    args = parser.parse_args(flags)
    launch(fetch_and_load, args, role_name)
    for rank in range(2):
        assert (tmp_path / f"out/rank{rank}").read_text(encoding="utf-8") == "[[10, 1, 28, 28], [10, 1, 28, 28]]"
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(files) == [f"MNIST/raw/{half}-images-idx3-ubyte" for half in ("t10k", "train")]
    assert [path.name for path in folder.iterdir()] == ["MNIST"]  # no temporary folder is left


def test_nobody_waits_for_ever_for_the_first(tmp_path, monkeypatch, capsys):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(data, "FETCH_S", 0.5)
    with pytest.raises(SystemExit, match="^2$"):
        fetch_data(SimpleNamespace(dataset="mnist", data_dir=tmp_path / "nowhere"))
    assert "does not hold MNIST" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()  # it has fetched nothing itself


# --- sessions


def test_devices(monkeypatch):
    """The tutorial 6_7 wants cuda:0 and cuda:1, and does not start without them."""
    devices = {}
    for gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        for rank in ("1", "2"):
            monkeypatch.setenv("LOCAL_RANK", rank)
            devices.setdefault(gpus, []).append(str(device_for("auto")))
    assert devices == {0: ["cpu", "cpu"], 1: ["cuda:0", "cuda:0"], 2: ["cuda:1", "cuda:0"]}


def test_wait_all_raises_at_once():
    """`torch.futures.wait_all` would wait for the two futures that never end."""
    futures = [torch.futures.Future() for _ in range(3)]
    futures[1].set_exception(KeyError(1))
    with pytest.raises(KeyError):
        wait_all(futures)
    futures = [torch.futures.Future() for _ in range(3)]
    for index in (2, 0, 1):
        futures[index].set_result(index)
    assert wait_all(futures) == [0, 1, 2]
    assert wait_all([]) == []


# --- comparisons


def compared(run, oracle, tolerance=1e-6, **options):
    findings = Comparison("3 processes")
    difference = findings.close("weights", run, oracle, tolerance, "float32 sums", **options)
    (finding,) = findings.findings
    return difference, finding["holds"], finding["says"]


@quick
def test_close():
    run = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0 + 2e-6])}]
    oracle = [{"w": [1.0, 2.0]}, {"w": [3.0, 4.0]}]
    difference, holds, says = compared(run, oracle)
    assert holds
    assert difference == pytest.approx(5e-7, rel=0.1)
    assert "4 numbers of 2 steps" in says
    assert "float32 sums" in says


@quick
def test_it_says_where_the_first_difference_is():
    run = [{"w": torch.zeros(2, 2)}, {"w": torch.tensor([[0.0, 0.0], [0.5, 0.0]])}, {"w": torch.full((2, 2), 9.0)}]
    difference, holds, says = compared(run, [{"w": torch.zeros(2, 2)}] * 3, unit="episode", scale_at_least=1.0)
    assert not holds
    assert difference == 9
    assert "first differs at episode 2, w[1, 0]: 0.5 in 3 processes, 0 in one process" in says


@quick
@pytest.mark.parametrize(("run", "oracle", "words"), [
    ([[1.0, 2.0]], [[1.0, 2.0, 3.0]], "shape [2] in 3 processes, [3] in one process"),
    ([1.0], [1.0, 2.0], "1 step in 3 processes, 2 steps in one process"),
    ([1.0, 2.0], [1.0], "2 steps in 3 processes, 1 step in one process"),
    ([{"a": 1.0}], [{"b": 1.0}], "a, b on one side only"),
    ([math.nan], [math.nan], "nan in 3 processes"),
    ([math.inf], [1.0], "inf in 3 processes"),
    ([[math.inf, 1.0]], [[math.inf, 2.0]], "[1]: 1 in 3 processes, 2 in one process"),
    ([[[0, 1], [2]]], [[[0, 1], [3]]], "first differs at step 1, 1[0]: 2 in 3 processes"),
    ([[torch.ones(2), torch.ones(3)]], [[torch.ones(2), torch.zeros(3)]], "step 1, 1[0]: 1 in 3 processes"),
    # A large weight must not hide what is wrong with a small one.
    ([{"large": 1e6, "small": 1e-3}], [{"large": 1e6, "small": 1.1e-3}], "small"),
    ([], [], "nothing was recorded"),
])
def test_what_can_never_be_equal(run, oracle, words):
    _, holds, says = compared(run, oracle)
    assert not holds
    assert words in says


@quick
def test_equal_has_no_tolerance():
    findings = Comparison("3 processes")
    assert findings.equal("actions", [[0, 1]], [[0, 1]], "same draws") == 0
    assert findings.equal("actions", [[0.0, 1.0]], [[0, 1 + 1e-15]], "same draws") > 0


@quick
def test_verdict(capsys):
    findings = Comparison("3 processes")
    findings.equal("actions", [1], [1], "same draws")
    assert verdict(findings.as_dict()) == {"actions": 0.0}
    findings.holds("updates", False, "7 were sent and 6 arrived")
    with pytest.raises(SystemExit, match="^1$"):
        verdict(findings.as_dict())
    out = capsys.readouterr().out
    assert "[check] updates: 7 were sent and 6 arrived: FAIL\n" in out
    assert out.endswith("check FAILED: 3 processes against one process: 1 of 2 comparisons do not hold: updates\n")
    assert verdict(None) is None


# --- speeds and metrics


@quick
def test_speeds(monkeypatch):
    """Work per second of the time inside `with clock`; no speed if there was no work."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    clock = report.Clock()
    for inside, outside in ((2.0, 50.0), (1.0, 7.0)):
        with clock:
            now.seconds += inside
        now.seconds += outside
    assert clock.seconds == 3.0
    assert report.per_second(12, clock.seconds) == 4.0
    assert report.per_second(0, 0.0) is None


@quick
@pytest.mark.parametrize(("flag", "where", "device"), [("auto", None, "Some GPU"), ("cpu", None, "cpu"), ("auto", "cpu", "cpu")])
def test_metrics_say_where_the_tensors_were(flag, where, device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    args = SimpleNamespace(device=flag, output_dir=tmp_path, example="x", world_size=1, seed=0)
    saved = report.save_metrics(args, {"loss": 0.5}, "gloo", where)
    assert saved == json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert (saved["device"], saved["loss"], saved["backend"]) == (device, 0.5, "gloo")


# --- pictures


def tables():
    """Every table of words in both languages, of all lessons, by the module's name."""
    def found(value):
        if isinstance(value, dict):
            if set(value) == {"en", "ja"}:
                yield value
            else:
                for inner in value.values():
                    yield from found(inner)

    files = [str(path.relative_to(ROOT)) for lesson in lessons() for path in (ROOT / lesson.folder).glob("*results.py")]
    for path in [*files, "tracing/timeline.py", "common/picture.py"]:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for table in found({name: value for name, value in vars(module).items() if name.isupper()}):
            # A text or several texts alone are no dict of them.
            yield path, {language: texts if isinstance(texts, dict) else dict(enumerate([texts] if isinstance(texts, str) else texts))
                         for language, texts in table.items()}


def blanks(text):
    """What is filled into a text: the names in braces, and how often "%s" and the like."""
    names = {name for _, name, _, _ in string.Formatter().parse(text) if name}
    return names, text.count("%s") + text.count("%d") + text.count("%.")


def test_both_languages_have_the_same_words():
    for path, table in tables():
        assert table["en"].keys() == table["ja"].keys(), path
        for name, text in table["en"].items():
            assert blanks(text) == blanks(table["ja"][name]), (path, name)
            assert bool(text) == bool(table["ja"][name]), (path, name)


def test_the_font_has_every_sign():
    import matplotlib_fontja
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    fonts = [matplotlib_fontja.get_font_ttf_path(), font_manager.findfont("DejaVu Sans")]
    signs = {sign for font in fonts for sign in map(chr, FT2Font(font).get_charmap())}
    for path, table in tables():
        for text in table["ja"].values():
            assert not set(text) - signs - {"\n"}, path


@pytest.mark.parametrize(("asked", "drawn"), [
    (None, ["loss.png"]), ("ja", ["loss.ja.png"]), ("en,ja", ["loss.ja.png", "loss.png"]),
])
def test_languages(asked, drawn, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("PICTURE_LANGUAGES", raising=False)
    if asked:
        monkeypatch.setenv("PICTURE_LANGUAGES", asked)
    titles = []
    for axes, words in picture.in_each_language(tmp_path / "loss.png", WORDS, MACHINE, n=2):
        axes.plot([1, 2], label=words["mean"])
        titles.append(axes.get_title("left"))
    assert sorted(path.name for path in tmp_path.iterdir()) == drawn
    assert titles == [title for title, name in (("Loss of 2", "loss.png"), ("2個の損失", "loss.ja.png"))
                      if name in drawn]
    assert capfd.readouterr().err == ""  # no font is missing, and no glyph


@pytest.mark.parametrize(("panels", "entries"), [(1, 1), (1, 9), (2, 4)])
def test_nothing_overlaps(panels, entries, tmp_path, monkeypatch):
    """Panels, the label of the lowest, the legend and the caption stand below each other, within the picture."""
    monkeypatch.setenv("PICTURE_LANGUAGES", "en,ja")
    words = {language: {**texts, "y2": "y"} for language, texts in WORDS.items()}
    figures = []
    for axes, texts in picture.in_each_language(tmp_path / "loss.png", words, MACHINE, panels, n=2):
        lowest = axes if panels == 1 else axes[-1]
        for number in range(entries):
            lowest.plot([0, 1], [0, number], label=texts["mean"] + " of them all" * (number % 3) + str(number))
        figures.append(lowest.figure)
    assert len(figures) == 2
    for figure in figures:
        lowest = figure.axes[-1]
        parts = [*(panel.get_window_extent() for panel in figure.axes), lowest.xaxis.label.get_window_extent(),
                 lowest.get_legend().get_window_extent(), figure._supxlabel.get_window_extent()]
        assert all(upper.y0 >= lower.y1 for upper, lower in zip(parts, parts[1:], strict=False))
        assert all(part.x0 >= 0 and part.x1 <= figure.bbox.width and part.y0 >= 0 for part in parts)
