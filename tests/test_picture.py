"""The pictures: one style, two languages."""

import importlib
import string

from common import picture

import pytest

from tests.test_layout import FILES

MACHINE = {"cpu_count": 2, "device": "cpu", "torch": "2.13.0+cpu"}
WORDS = {"en": {"title": "Loss of {n}", "x": "epoch", "y": "loss (nats)", "mean": "their mean"},
         "ja": {"title": "{n}個の損失", "x": "エポック", "y": "損失（ナット）", "mean": "平均"}}


def tables():
    """Every table of words in both languages, of all lessons, by the module's name."""
    def found(value):
        if isinstance(value, dict):
            if set(value) == {"en", "ja"}:
                yield value
            else:
                for inner in value.values():
                    yield from found(inner)

    files = [path for path in FILES if path.endswith("results.py")]
    for path in [*files, "tracing/page.py", "common/picture.py"]:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for name in ("WORDS", "TIMELINE_TITLE", "CAPTIONS"):
            for table in found(getattr(module, name, None)):
                # A title alone is a text, not a dict of them.
                yield path, {language: {"title": texts} if isinstance(texts, str) else texts
                             for language, texts in table.items()}


def blanks(text):
    """What is filled into a text: the names in braces, and how often "%s" and the like."""
    names = {name for _, name, _, _ in string.Formatter().parse(text) if name}
    return names, text.count("%s") + text.count("%d") + text.count("%.")


@pytest.mark.parametrize(("path", "table"), list(tables()))
def test_both_languages_have_the_same_words(path, table):
    assert table["en"].keys() == table["ja"].keys()
    for name, text in table["en"].items():
        assert blanks(text) == blanks(table["ja"][name]), name
        assert bool(text) == bool(table["ja"][name]), name


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
    (None, ["loss.png"]), ("en", ["loss.png"]), ("ja", ["loss.ja.png"]), ("fr", ["loss.png"]),
    ("en,ja", ["loss.ja.png", "loss.png"]),
])
def test_languages(asked, drawn, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("PICTURE_LANGUAGES", raising=False)
    if asked:
        monkeypatch.setenv("PICTURE_LANGUAGES", asked)
    titles = []
    for axes, words in picture.in_each_language(tmp_path / "loss.png", WORDS, [MACHINE], n=2):
        axes.plot([1, 2], label=words["mean"])
        titles.append(axes.get_title("left"))
    assert sorted(path.name for path in tmp_path.iterdir()) == drawn
    assert titles == [title for title, name in (("Loss of 2", "loss.png"), ("2個の損失", "loss.ja.png"))
                      if name in drawn]
    assert capfd.readouterr().err == ""  # no font is missing, and no glyph


@pytest.mark.parametrize("entries", [1, 4, 9])
@pytest.mark.parametrize("panels", [1, 2])
def test_nothing_overlaps(panels, entries, tmp_path, monkeypatch):
    """Panels, the label of the lowest, the legend and the caption stand below each other, within the picture."""
    monkeypatch.setenv("PICTURE_LANGUAGES", "en,ja")
    words = {language: {**texts, "y2": "y"} for language, texts in WORDS.items()}
    figures = []
    for axes, texts in picture.in_each_language(tmp_path / "loss.png", words, [MACHINE], panels, n=2):
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


def test_caption():
    english, japanese = (picture.CAPTIONS[language] for language in ("en", "ja"))
    assert picture.caption([MACHINE], english) == "One run. 2 CPU cores, torch 2.13.0"
    assert picture.caption([MACHINE] * 3, japanese) == "3回の測定の中央値と範囲。CPU 2コア、torch 2.13.0"
    gpu = {**MACHINE, "device": "NVIDIA H200", "cpu_count": 1}
    own = {**english, "one": "Four rounds"}
    assert picture.caption([gpu], own) == "Four rounds. NVIDIA H200, 1 CPU core, torch 2.13.0"


def test_medians_and_ranges():
    assert picture.median_and_errors([[1, 5], [2, 9], [4, 6]]) == ([2, 6], ([1, 1], [2, 3]))
    assert picture.median_and_errors([[1, 5]]) == ([1, 5], None)
