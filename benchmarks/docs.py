"""Write code, outputs, numbers and maps into the pages.

    python -m benchmarks.docs            write

In a page, in either language (`*.ja.md` is Japanese):

    <!-- = rpc_rl env_steps_per_s -->1659 (1602 to 1790)<!-- end -->     a median with its range
    <!-- = rpc_rl env_steps_per_s .0f median -->1659<!-- end -->         without it
    <!-- code rpc_rl/main.py::Agent.select_action -->...<!-- end -->    as it stands there now
    <!-- output rpc_rl -->...<!-- end -->         what a command printed: benchmarks/outputs.py
    <!-- output rpc_rl 2 3 -->...<!-- end -->     of that the first 2 and the last 3 lines
    <!-- replay rpc_rl -->...<!-- end -->         a link to its messages, step by step
    <!-- map 6_5 -->...<!-- end -->               the cell index, from docs/walk/6_5.json
    <!-- lessons all -->...<!-- end -->           the table of lessons, from lesson.toml
    <!-- exercises all -->...<!-- end -->         the table of exercises, from exercises/texts/
"""

import ast
import json
import os
import re
import textwrap
import tomllib
from operator import itemgetter
from pathlib import Path

from common import ROOT
from common.cli import PlainParser
from common.lessons import lessons

from benchmarks import outputs

KINDS = "=|code|output|replay|map|lessons|exercises"
MARKED = re.compile(rf"(<!-- ({KINDS}) ([^>]*?) -->)(.*?)(<!-- end -->)", re.DOTALL)
CELLS = r"(?:[Cc]ells? |セル)(\d[\d〜、]*(?:(?:,| to| and) \d+)*)"  # in a heading: "Cells 4 to 6"
NOT_MEASURED = "–"
WORDS = {  # column titles and cells of the tables
    "en": {"cell": "cell", "first words": "its first words", "point": "the point, or the bug",
           "here": "here", "lesson": "lesson", "guide": "beside the notebook",
           "teaches": "what it teaches", "number": "no.", "exercise": "exercise",
           "chapter": "chapter and cell, or program", "kind": "kind", "minutes": "minutes",
           "afternoon": "afternoon", "write": "write", "fix": "fix", "predict": "predict",
           "picture": "![What each process does over time, in a recorded run; the arrows are "
                      "messages]({picture})",
           "replay": "**Message by message**, in `replay.html`: `{command}` "
                     "([a recorded run]({link}))"},
    "ja": {"cell": "セル", "first words": "書き出し", "point": "要点・不具合", "here": "ここでは",
           "lesson": "レッスン", "guide": "ノートブックの解説", "teaches": "学ぶこと",
           "number": "番号", "exercise": "問題", "chapter": "章とセル、またはプログラム",
           "kind": "種類", "minutes": "分", "afternoon": "半日コース", "write": "書く",
           "fix": "直す", "predict": "予測する",
           "picture": "![記録した実行での各プロセスの動き。矢印はメッセージ]({picture})",
           "replay": "**1通ずつたどる**（`replay.html`）：`{command}`"
                     "（[記録の例]({link})）"},
}


def pages():
    """All pages that may have markers."""
    return sorted({*ROOT.glob("*.md"), *ROOT.glob("*/README*.md"), *ROOT.glob("docs/**/*.md")})


def written(page):
    """The text of a page with everything between markers written anew."""
    language = "ja" if page.name.endswith(".ja.md") else "en"

    def write(match):
        begin, kind, what, _, end = match.groups()
        if kind == "=":
            return begin + number(what, language) + end
        made = {"map": lambda: map_of(what, language, page),
                "lessons": lambda: table_of_lessons(language, page),
                "exercises": lambda: table_of_exercises(language),
                "code": lambda: definition(what, page.parent),
                "output": lambda: printed(*what.split()),
                "replay": lambda: replay(what, language, page.parent)}[kind]()
        return f"{begin}\n\n{made}\n\n{end}"

    return MARKED.sub(write, page.read_text(encoding="utf-8"))


def number(what, language):
    """A median with its range: `NAME KEY`, `NAME KEY FORMAT` or `NAME KEY FORMAT median`."""
    name, key, *form = what.split()
    path = ROOT / "docs/results" / f"{name}.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"range": {}}
    if key not in results["range"]:
        return NOT_MEASURED
    (low, high), (form, *alone) = results["range"][key], form or [".3g"]
    median, low, high = (format(value, form) for value in (results["median"][key], low, high))
    if alone or results["median"].get("rounds", 1) > 1 == results["runs"]:
        return median  # the page says of how many; or the command itself has made several rounds
    if results["runs"] == 1:
        return f"{median}（1回）" if language == "ja" else f"{median} (1 run)"
    if low == high:
        return median
    return f"{median}（{low}〜{high}）" if language == "ja" else f"{median} ({low} to {high})"


def map_of(chapter: str, language: str, page: Path) -> str:
    """Return the cell index of a notebook: each cell, its first words, its point, our code."""
    words = WORDS[language]
    sections = sections_of(page.read_text(encoding="utf-8"))
    edition = json.loads((ROOT / "docs/japanese_edition.json").read_text(encoding="utf-8"))
    notebook = next(book for book in edition["notebooks"] if book["chapter"] == chapter)
    link = f"{edition['source']}/blob/main/{notebook['file']}"
    lines = [f"[{chapter} {notebook['title']}]({link})", "",
             f"| {words['cell']} | {words['first words']} | {words['point']} | {words['here']} |",
             "|---|---|---|---|"]
    for row in json.loads((ROOT / f"docs/walk/{chapter}.json").read_text(encoding="utf-8")):
        first = f"**{row['heading']}**" if "heading" in row else f"「{row['words']}…」"
        here = ", ".join(place(in_language(there, language), page.parent) for there in row["here"]
                         if "__init__" not in there)
        point = row[language].replace("|", r"\|")  # else it would end the cell of the table
        lines.append(f"| {numbered(row['cell'], sections)} | {first.replace('|', chr(92) + '|')} | "
                     f"{point} | {here} |")
    return "\n".join(lines)


def table_of_lessons(language: str, page: Path) -> str:
    """Return the table of lessons, in the order to begin with."""
    suffix, words = {"en": "", "ja": ".ja"}[language], WORDS[language]
    to_root = os.path.relpath(ROOT, page.parent)
    head = f"| | {words['lesson']} | {words['guide']} | {words['teaches']} |"
    lines = [head, "|---|---|---|---|"]
    for lesson in lessons():
        folder = f"[{lesson.folder}]({to_root}/{lesson.folder}/README{suffix}.md)"
        guides = ", ".join(f"[{chapter}]({to_root}/docs/lessons/{chapter}{suffix}.md)"
                           for chapter in lesson.chapters)
        text = lesson.ja if language == "ja" else lesson.en
        lines.append(f"| {lesson.start} | {folder} | {guides} | {text} |")
    return "\n".join(lines).replace("(./", "(")


def table_of_exercises(language: str) -> str:
    """Return the table of the workbook's exercises; the path of an afternoon is marked."""
    words = WORDS[language]
    head = (words["number"], words["exercise"], words["chapter"], words["kind"], words["minutes"],
            words["afternoon"])
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for path in sorted(ROOT.glob("exercises/texts/*.toml")):
        one = tomllib.loads(path.read_text(encoding="utf-8"))
        where = f"{one['chapter']}, {one['cell']}" if "cell" in one else one["chapter"]
        title = f"[{one[language]['title']}](stubs/{path.stem}.py)"
        lines.append(f"| {path.stem[:2]} | {title} | {where} | {words[one['kind']]} | "
                     f"{one['minutes']} | {one.get('afternoon', '')} |")
    return "\n".join(lines)


def sections_of(text):
    """The headings of a page that name cells: `{anchor: (whether in brackets, cells)}`."""
    sections = {}
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        first = re.match(rf"{CELLS}[：:]", heading)
        if match := first or re.search(rf"[（(]{CELLS}[）)]$", heading):
            numbers = [*map(int, re.findall(r"\d+", match[1]))]
            cells = range(numbers[0], numbers[-1] + 1) if re.search("〜|to", match[1]) else numbers
            sections[anchor_of(heading)] = not first, cells
    return sections


def anchor_of(heading):
    """The anchor of a heading, as GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def numbered(cell, sections):
    """The number of a cell; it leads to the first section about it, if there is one."""
    about = [(in_brackets, anchor)
             for anchor, (in_brackets, cells) in sections.items() if cell in cells]
    return f"[{cell}](#{min(about, key=itemgetter(0))[1]})" if about else cell


def in_language(see, language):
    """The Japanese page in the place of an English one, for a Japanese reader, if there is one."""
    japanese = see if ".ja.md" in see else see.replace(".md", ".ja.md")
    return japanese if language == "ja" and (ROOT / japanese.partition("#")[0]).exists() else see


def place(there, folder):
    """A link to `file.py::name`, with its line, as seen from `folder`."""
    path, _, name = there.partition("::")
    target = os.path.relpath(ROOT / path, folder)
    if not name:
        return f"[`{path.partition('#')[0]}`]({target})"
    return f"[`{name}`]({target}#L{node_of(path, name).lineno})"


def node_of(path, name):
    """The definition of a function, class or method."""
    node = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(inner for inner in node.body if getattr(inner, "name", None) == part)
    return node


def definition(there, folder):
    """The source of `file.py::name`, decorators and comments included, below a link to it."""
    path, _, name = there.partition("::")
    node = node_of(path, name)
    first = min([node, *node.decorator_list], key=lambda part: part.lineno).lineno
    whole, end = (ROOT / path).read_text(encoding="utf-8").splitlines(), node.end_lineno
    inside = " " * (node.col_offset + 1)
    while whole[end:] and whole[end].startswith(inside) and whole[end].lstrip().startswith("#"):
        end += 1  # its last comment
    lines = whole[first - 1:end]
    target = f"{os.path.relpath(ROOT / path, folder)}#L{node.lineno}"
    return f"[`{path}`]({target})\n\n{fenced(textwrap.dedent(chr(10).join(lines)), 'python')}"


def printed(name, *lines):
    """Return a command and what it printed, or only some first and last lines of that."""
    text = (outputs.TRANSCRIPTS / f"{name}.txt").read_text(encoding="utf-8")
    if lines:
        (first, last), (_, *whole) = map(int, lines), text.splitlines()
        text = "\n".join([*whole[:first], "...", *whole[-last:]])
    return fenced(text)


def replay(name, language, folder):
    """The picture of a run, and a line that leads to its replay."""
    file = outputs.REPLAYS / f"{name}.json"
    link = os.path.relpath(file, folder)
    picture = link.replace(".json", ".png" if language == "en" else f".{language}.png")
    words = [WORDS[language]["replay"]]
    if file.with_suffix(".png").exists():
        words.insert(0, WORDS[language]["picture"])
    return "\n\n".join(words).format(link=link, picture=picture,
                                     command=outputs.command_of(file))


def fenced(text, language=""):
    """As a block of code of Markdown."""
    return f"```{language}\n{text.rstrip()}\n```"


def out_of_date():
    """Return `{page: text}` of the pages whose text would change."""
    texts = {page: written(page) for page in pages()}
    return {path: text for path, text in texts.items() if text != path.read_text(encoding="utf-8")}


def main(argv=None):
    """Write the pages."""
    PlainParser(__doc__).parse_args(argv)
    for path, text in out_of_date().items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
