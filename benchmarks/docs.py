"""Write measured numbers and the maps of the notebooks into the pages, or check the pages.

    python -m benchmarks.docs            write
    python -m benchmarks.docs --check    status 1 if a page is not what would be written

In a page, in either language (`*.ja.md` is Japanese):

    <!-- = rpc_rl env_steps_per_s -->1659 (1602 to 1790)<!-- end -->     a median with its range
    <!-- = rpc_rl env_steps_per_s .0f median -->1659<!-- end -->         without it
    <!-- map 6_5_rpc_rl -->...<!-- end -->        the table of docs/walk/6_5_rpc_rl.json
"""

import ast
import json
import os
import re
from pathlib import Path

from common.cli import PlainParser

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- (=|map) ([^>]*?) -->)(.*?)(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "–"
WORDS = {  # column titles and cells of the map
    "en": {"cell": "cell", "notebook": "notebook", "here": "here", "mended": "mended",
           "left_out": "left out: "},
    "ja": {"cell": "セル", "notebook": "ノートブック", "here": "ここでは", "mended": "修正点",
           "left_out": "省略："},
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
        return f"{begin}\n\n{map_of(what, language, page.parent)}\n\n{end}"

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
