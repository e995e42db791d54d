"""The one style of all pictures, in English and Japanese.

    WORDS = {"en": {"title": "Loss of {n} trainers", "x": "epoch", "y": "loss (nats)",
                    "mean": "their mean"},
             "ja": {"title": "{n}つのトレーナーの損失", ...}}

    for axes, words in picture.in_each_language(folder / "loss.png", WORDS, metrics, n=2):
        axes.plot(..., label=words["mean"])

A run draws `loss.png`, in English. With `PICTURE_LANGUAGES=en,ja` in the environment it also draws
`loss.ja.png`, in Japanese.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from common.limits import refuse, shortened
from common.report import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By Okabe and Ito, https://jfly.uni-koeln.de/color/: color-blind readers distinguish them.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
WIDTH = 8  # of a picture, in inches
BELOW_THE_AXES = 0.58  # where the legend begins, below numbers and label: in inches
GREY = "0.55"  # a single measurement, or what is only there to compare with
STYLE = {"axes.axisbelow": True, "axes.grid": True, "axes.spines.right": False,
         "axes.spines.top": False, "axes.titlelocation": "left", "axes.titlepad": 10,
         "axes.titlesize": 12, "axes.titleweight": "bold", "figure.dpi": 120, "font.size": 10,
         "grid.color": "0.9", "hatch.linewidth": 0.6, "legend.frameon": False,
         "savefig.dpi": 120}
CAPTIONS = {
    "en": {"one": "One run", "cores": "{n} CPU cores", "core": "1 CPU core", "then": ". ",
           "and": ", "},
    "ja": {"one": "1回の測定", "cores": "CPU {n}コア", "core": "CPU 1コア", "then": "。",
           "and": "、"},
}


def in_each_language(path: Path, words: dict[str, dict[str, str]], metrics: dict | None,
                     panels: int = 1, height: float = 4.5,
                     **values: object) -> Iterator[tuple["Axes | list[Axes]", dict[str, str]]]:
    """Yield axes and words, once for each requested language; save what was drawn there.

    Args:
        path: Path of the English PNG, written whole or not at all; `x.ja.png` is the Japanese one.
        words: `{"en": {name: text}, "ja": ...}`; the `values` fill the braces of each text. The
            picture uses `title`, `x` and `y` (`y2`, ... for the panels below), `y` with its unit,
            and `one`, if there is one, for the caption's first words.
        metrics: Metrics of the run (`report.save_metrics`); the caption names its machine. None if
            the machine does not matter.
        panels: Number of axes below each other; with several, a list is yielded instead of axes.
        height: Height in inches.
    """
    import matplotlib  # here: the workers need not pay for the import
    from matplotlib.figure import Figure  # no pyplot, which would look for a display

    for language in asked_for():
        texts = {name: text.format(**values) for name, text in words[language].items()}
        with matplotlib.rc_context({**STYLE, "axes.prop_cycle": matplotlib.cycler(color=COLORS)}):
            if language == "ja":
                _use_japanese_font(matplotlib)
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            axes = figure.subplots(panels, sharex=panels > 1, squeeze=False)[:, 0]
            axes[0].set_title(texts["title"])
            axes[-1].set_xlabel(texts["x"])
            for number, panel in enumerate(axes, start=1):
                panel.set_ylabel(texts["y" if number == 1 else f"y{number}"])
            yield (axes if panels > 1 else axes[0]), texts
            _add_legend(figure)
            figure.supxlabel(caption(metrics, {**CAPTIONS[language], **texts}), x=0.99, ha="right",
                             fontsize=8, color="0.45")
            there = path if language == "en" else path.with_suffix(f".{language}.png")
            with replacing(there) as temporary:
                figure.savefig(temporary, format="png")


def asked_for() -> list[str]:
    """Return the languages of `PICTURE_LANGUAGES`, English by default; refuse unknown languages."""
    setting = os.environ.get("PICTURE_LANGUAGES") or "en"
    wanted = setting.split(",")
    if not set(wanted) <= set(CAPTIONS):
        refuse(f"PICTURE_LANGUAGES={shortened(setting)} must be one or more of "
               f"{','.join(CAPTIONS)}", None)
    return [language for language in CAPTIONS if language in wanted]


def _use_japanese_font(matplotlib: ModuleType) -> None:
    import matplotlib_fontja
    from matplotlib.font_manager import fontManager

    fontManager.addfont(matplotlib_fontja.get_font_ttf_path())
    # It has one weight only, and not every sign.
    matplotlib.rcParams.update({"font.family": [matplotlib_fontja.matplotlib_fontja.FONT_NAME,
                                                "DejaVu Sans"], "axes.titleweight": "normal"})


def caption(metrics: dict | None, words: dict[str, str]) -> str:
    """Write what was measured, and on which machine: "One run. 2 CPU cores, torch 2.13.0"."""
    if metrics is None:
        return words["one"]
    cores = words["core" if metrics["cpu_count"] == 1 else "cores"].format(n=metrics["cpu_count"])
    parts = [cores, f"torch {metrics['torch'].split('+')[0]}"]
    if metrics["device"] != "cpu":
        parts.insert(0, metrics["device"])
    return words["one"] + words["then"] + words["and"].join(parts)


def _add_legend(figure: "Figure") -> None:
    """Add one legend for all panels, below the lowest, where it hides no point."""
    from matplotlib.transforms import ScaledTranslation

    entries = {}  # one for each label, also where panels share it
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        widest = next(n for n in (5, 4, 3, 2, 1)
                      if n == 1 or _legend_width(list(entries), n) < WIDTH - 0.8)
        rows = -(-len(entries) // widest)
        columns = -(-len(entries) // rows)  # no more than so many rows need
        below = ScaledTranslation(0, -BELOW_THE_AXES, figure.dpi_scale_trans)
        figure.axes[-1].legend(entries.values(), entries, loc="upper center", borderaxespad=0,
                               ncols=columns, bbox_to_anchor=(0.5, 0),
                               bbox_transform=figure.axes[-1].transAxes + below)


def _legend_width(labels: list[str], columns: int) -> float:
    """Estimate how many inches wide a legend is; matplotlib fills it column by column."""
    widths = [0.45 + sum(0.14 if ord(sign) > 0x2E80 else 0.075 for sign in label)
              for label in labels]
    rows = -(-len(labels) // columns)
    return sum(0.2 + max(widths[start : start + rows]) for start in range(0, len(widths), rows))

