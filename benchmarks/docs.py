"""Write measured numbers, maps and tables of faults into the pages, or check the pages.

    python -m benchmarks.docs            write
    python -m benchmarks.docs --check    status 1 if a page is not what would be written

In a page, in either language (`*.ja.md` is Japanese):

    <!-- = rpc_rl env_steps_per_s -->1659 (1602 to 1790)<!-- end -->     a median with its range
    <!-- = rpc_rl env_steps_per_s .0f median -->1659<!-- end -->         without it
    <!-- map 6_5_rpc_rl -->...<!-- end -->        the table of docs/walk/6_5_rpc_rl.json
    <!-- table faults_rank -->...<!-- end -->     what the tests expect: tests/fault_table.py
    <!-- table faults_launcher -->...<!-- end -->
"""

import ast
import json
import os
import re
from pathlib import Path

from common.cli import PlainParser

from tests.fault_table import OF_A_LAUNCHER, OF_A_RANK

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- (=|map|table) ([^>]*?) -->)(.*?)(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "–"
WORDS = {  # column titles and cells of the tables
    "en": {"cell": "cell", "notebook": "notebook", "here": "here", "mended": "mended",
           "left_out": "left out: ",
           "to_a_rank": "what happens to rank 1 (role1)", "within": "ends within",
           "line": "local run, manual launch", "under_torchrun": "torchrun", "same": "the same",
           "traceback": " after its traceback",
           "way": "way in", "to_another": "what happens", "report": "line", "status": "status",
           "local": "local run", "manual": "manual launch, terminal of rank 1",
           "torchrun": "torchrun", "import": "start", "connect": "connecting", "run": "run",
           "shutdown": "end",
           "goes_on": "none: the run goes on", "silence": "none",
           "others": "other terminals: ", "comma": ", "},
    "ja": {"cell": "セル", "notebook": "ノートブック", "here": "ここでは", "mended": "修正点",
           "left_out": "省略：",
           "to_a_rank": "ランク1（role1）に起きること", "within": "終了まで",
           "line": "ローカル、手動", "under_torchrun": "torchrun", "same": "同じ",
           "traceback": "（トレースバックの後）",
           "way": "起動方法", "to_another": "起きること", "report": "表示される行",
           "status": "終了ステータス",
           "local": "ローカル", "manual": "手動（ランク1のターミナル）",
           "torchrun": "torchrun", "import": "起動中", "connect": "接続中", "run": "実行中",
           "shutdown": "終了時",
           "goes_on": "なし。実行は続く", "silence": "なし",
           "others": "ほかのターミナル：", "comma": "、"},
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
        made = map_of(what, language, page.parent) if kind == "map" else TABLES[what](language)
        return f"{begin}\n\n{made}\n\n{end}"

    return MARKED.sub(write, page.read_text())


def number(what, language):
    """A median with its range: `NAME KEY`, `NAME KEY FORMAT` or `NAME KEY FORMAT median`."""
    name, key, *form = what.split()
    path = ROOT / "docs/results" / f"{name}.json"
    results = json.loads(path.read_text()) if path.exists() else {"range": {}}
    if key not in results["range"]:
        return NOT_MEASURED
    (low, high), (form, *alone) = results["range"][key], form or [".3g"]
    median, low, high = (format(value, form) for value in (results["median"][key], low, high))
    if alone or results["median"].get("rounds", 1) > 1 == len(results["runs"]):
        return median  # the page says of how many; or the command itself has made several rounds
    if len(results["runs"]) == 1:
        return f"{median}（1回）" if language == "ja" else f"{median} (1 run)"
    if low == high:
        return median
    return f"{median}（{low}〜{high}）" if language == "ja" else f"{median} ({low} to {high})"


def map_of(walk, language, folder):
    """The table of a part of a notebook: cell, heading or definitions, where they are here."""
    words = WORDS[language]
    chapter = re.match(r"6_\d", walk)[0]
    edition = json.loads((ROOT / "docs/japanese_edition.json").read_text())
    notebook = next(book for book in edition["notebooks"] if book["chapter"] == chapter)
    link = f"{edition['source']}/blob/main/{notebook['file']}"
    cells = {cell["cell"]: cell for cell in notebook["cells"]}
    lines = [f"[{chapter} {notebook['title']}]({link})", "",
             f"| {words['cell']} | {words['notebook']} | {words['here']} | {words['mended']} |",
             "|---|---|---|---|"]
    for row in json.loads((ROOT / "docs/walk" / f"{walk}.json").read_text()):
        if "heading" in row:
            there = place(in_language(row["see"], language), folder)
            lines.append(f"| {row['cell']} | **{row['heading']}** | {there} | |")
            continue
        outer = {name: there for name, there in row["names"].items() if "__init__" not in name}
        outer = outer or row["names"]
        cell = cells[row["cell"]]
        theirs = [name for name in cell["defines"] if "__init__" not in name]
        names = ", ".join(f"`{name}`" for name in theirs or [cell["first_line"]])
        names = names.replace("|", r"\|")  # else it would end the cell of the table
        here = ", ".join(dict.fromkeys(place(there, folder) for there in outer.values() if there))
        suffix = "_ja" if language == "ja" else ""
        mended, left_out = (row.get(f"{key}{suffix}", row[key]) for key in ("mended", "left_out"))
        notes = filter(None, [mended, left_out and words["left_out"] + left_out])
        notes = ("。" if language == "ja" else "; ").join(notes)
        lines.append(f"| {row['cell']} | {names} | {here} | {notes} |")
    return "\n".join(lines)


def in_language(see, language):
    """The Japanese page in the place of an English one, for a Japanese reader, if there is one."""
    japanese = see.replace(".md", ".ja.md")
    return japanese if language == "ja" and (ROOT / japanese).exists() else see


def place(there, folder):
    """A link to `file.py::name`, with its line, as seen from `folder`."""
    path, _, name = there.partition("::")
    target = os.path.relpath(ROOT / path, folder)
    if not name:
        return f"[`{path}`]({target})"
    return f"[`{name}`]({target}#L{line_of(path, name)})"


def line_of(path, name):
    """Where a function, class or method is defined."""
    nodes, line = ast.parse((ROOT / path).read_text()).body, 1
    for part in name.split("."):
        node = next(node for node in nodes if getattr(node, "name", None) == part)
        nodes, line = getattr(node, "body", []), node.lineno
    return line


def faults_of_a_rank(language):
    """The table of what ends a rank; what is reported alike is one row."""
    words, rows = WORDS[language], {}
    for fault in OF_A_RANK.values():
        known = {"timeout": 60, "rank": 1, "role": "role1"}
        who = "rank 0 (role0)" if fault.of_who_waits else "rank 1 (role1)"
        lines = [code(f"{who} {example(fault.expected(way).format(**known))}")
                 for way in ("local", "torchrun")]
        lines[1] = words["same"] if fault.torchrun is None else lines[1] if fault.torchrun else "–"
        if fault.traceback:
            lines[0] += words["traceback"]
        what, note = in_words(fault, "what", language), in_words(fault, "note", language)
        row = (*lines, within(fault, language))
        rows.setdefault(row, []).append(what + bracketed(note, language))
    return table([words[name] for name in ("to_a_rank", "line", "under_torchrun", "within")],
                 [("<br>".join(whats), *row) for row, whats in rows.items()])


def faults_beside(language):
    """The table of what happens to processes that are no ranks; what ends alike is one row."""
    words, rows = WORDS[language], {}
    for (way, phase), faults in OF_A_LAUNCHER.items():
        for fault in faults:
            line = (code(example(fault.line)) if fault.line
                    else code("interrupted; stopped 2 processes") if fault.status == 130
                    else words["silence" if fault.status else "goes_on"])
            if fault.others is not None:
                line += f"<br>{words['others']}{code(example(fault.others))}"
            status = 128 - fault.status if fault.status < 0 else fault.status  # as a shell shows it
            ends = within(fault, language) if fault.status else "–"
            whats = rows.setdefault((way, line, str(status), ends), {})
            whats.setdefault(in_words(fault, "what", language), []).append(words[phase])
    return table([words[name] for name in ("way", "to_another", "report", "status", "within")],
                 [(words[way], "<br>".join(what + bracketed(words["comma"].join(phases), language)
                                           for what, phases in whats.items()), *row)
                  for (way, *row), whats in rows.items()])


def example(pattern):
    """A line that a pattern of tests/fault_table.py describes."""
    inside = r"(?:\\.|[^()|\\])*"
    text = re.sub(rf"(?<!\\)\({inside}\)\?", "", pattern)  # what may be missing
    text = re.sub(rf"(?<!\\)\(({inside})\|(?:{inside}\|)*{inside}\)", r"\1", text)  # one of several
    text = text.replace(r"\S+:\d+", "X/main.py:88", 1).replace(r"\S+:\d+", "X/main.py:131")
    for what, shown in ((r"\d+ \(\w+\)", "1 (role1)"), ("`.*`", "`code`"), (r"\d+", "60"),
                        (r"\d", "0"), (".*", "..."), ("\\", "")):
        text = text.replace(what, shown)
    assert re.fullmatch(pattern, text), (pattern, text)
    return text


def within(fault, language):
    """By when the run has ended."""
    seconds = "10秒" if language == "ja" else "10 s"
    return f"`--timeout` + {seconds}" if fault.by_silence else seconds


def in_words(fault, name, language):
    """A text of a row in this language."""
    return getattr(fault, f"{name}_ja" if language == "ja" else name)


def bracketed(text, language):
    """In brackets, unless there is no text."""
    return text and (f"（{text}）" if language == "ja" else f" ({text})")


def code(text):
    """As Markdown's code, also if it has backticks in it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(titles, rows):
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


TABLES = {"faults_rank": faults_of_a_rank, "faults_launcher": faults_beside}


def main(argv=None):
    """Write the pages, or check them."""
    parser = PlainParser(__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    args = parser.parse_args(argv)
    stale = [page for page in pages() if written(page) != page.read_text()]
    for page in stale:
        print(f"{'out of date' if args.check else 'written'}: {page.relative_to(ROOT)}")
        if not args.check:
            page.write_text(written(page))
    raise SystemExit(bool(stale) and args.check)


if __name__ == "__main__":
    main()
