"""Build the site: the repository's pages in both languages, as static files that work offline.

    python site/build.py                  `make site`: outputs/site/index.html

This folder holds no text. The README and the pages of docs/, the lessons and the exercises become
the pages of a Japanese and an English site. A link to a program leads to a page with its lines.
Zensical builds both sites from zensical.toml. Two scripts come from the npm registry, because the
pages would otherwise load them from the network: Mermaid, which draws the diagrams, and a search
worker.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from common import ROOT
from common.lessons import lessons

from tracing import replay

OUT = ROOT / "outputs/site"
# npm package, file inside it, name of that file in the site
SCRIPTS = (("mermaid@11.17.2", "dist/mermaid.min.js", "mermaid.js"),
           ("iframe-worker@1.0.4", "shim/index.js", "iframe-worker.js"))
SHIM = re.compile(r'https://[^"]*/iframe-worker/shim')  # address a page would load the worker from
SWITCH = re.compile(r"https://(ja|en)\.invalid/")  # zensical.toml's links to the other language
ALTERNATE = re.compile(r'<link rel="alternate"[^>]*>')  # a browser would request this sitemap
# A screen reader would read the empty link in front of every line. Pages of programs have numbers.
EMPTY_LINK = re.compile(r'<a id="__codelineno-\d+-\d+" name="[^"]*" href="[^"]*"></a>')
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
PLAIN = re.compile(r"^( *```)\n((?:.{,84}\n)*)(?= *```$)", re.MULTILINE)  # text without long lines
COLUMNS = re.compile(r"\S {3,}\S|[-─]{4}")  # in a line of a diagram or of a table of characters
# line that names the file of the code below it
CODE = re.compile(r"(?<=-->\n\n)(\[`.*`\]\(.*\))$(?=\n\n\Z)", re.MULTILINE)
# link to a replay; FRAME shows the replay below the link
REPLAY = re.compile(r"<!-- replay (\w+) -->\n.*?\]\((\S+?\.json)\).*?\n<!-- end -->", re.DOTALL)
FRAME = ('\n\n<iframe class="replay" name="{}" loading="lazy" title="{}: {}" src="{}">'
         "</iframe>\n")
WIDE = "[\u3001-\u30ff\u4e00-\u9fff\uff01-\uff5e]"  # a Japanese character
# A line break beside one would show as a space. Breaks before list items and table rows remain.
BROKEN = re.compile(rf"(?<={WIDE})\n *(?![\s*|#<>{{-]|\d+\.)|(?<=[^\s|>])\n *(?={WIDE})")
LARGEST = 200_000  # bytes; a larger file gets no page
MORE = ("exercises.md", "errors.md", "faults.md", "several_machines.md")  # first under "more"
WORDS = {"ja": {"name": "PyTorch分散学習チュートリアル", "guide": "解説とレッスン", "more": "資料",
                "replay": "再生"},
         "en": {"name": "Distributed PyTorch tutorials", "guide": "Guide and lessons",
                "more": "More", "replay": "replay"}}
# The theme's search has only English texts.
SEARCH = {' ${i===1?"result":"results"}': "件", '"No results"': '"見つかりませんでした"',
          '"Loading search\\u2026"': '"検索を準備しています…"',
          '"Search is unavailable. Reload the page to try again."':
              '"検索できません。ページを再読み込みしてください。"',
          'placeholder:"Search"': 'placeholder:"検索"',
          '"aria-label":"Search"': '"aria-label":"検索"',
          '"Search results"': '"検索結果"', '"Close search"': '"検索を閉じる"'}


def pages(language: str) -> dict[str, str]:
    """Return the page's path in the repository for each path in the site of `language`."""
    found = {"index.md": own("README.md", language),
             "exercises.md": own("exercises/README.md", language)}
    for path in sorted(ROOT.glob("docs/**/*.md")):
        name = path.relative_to(ROOT).as_posix()
        if not name.endswith(".ja.md"):  # the navigation links a section to its index.md alone
            place = name.removeprefix("docs/")
            place = f"lessons/{path.stem}/index.md" if path.stem in chapters() else place
            found[place] = own(name, language)
    found |= {f"folders/{lesson.folder}.md": own(f"{lesson.folder}/README.md", language)
              for lesson in lessons()}
    found["contributing.md"] = "CONTRIBUTING.md"
    return found


def chapters() -> list[str]:
    """Return the chapters, "6_1" to "6_9" and "transformer": pages that continue no other page."""
    names = sorted(path.stem for path in ROOT.glob("docs/lessons/*.md") if "." not in path.stem)
    return [name for name in names if not any(name.startswith(f"{one}_") for one in names)]


def own(name: str, language: str) -> str:
    """Return the Japanese version of a page if the site is Japanese and the version exists."""
    japanese = name.removesuffix(".md") + ".ja.md"
    return japanese if language == "ja" and (ROOT / japanese).exists() else name


def navigation(language: str, titles: dict[str, str]) -> list[dict]:
    """Return the entries of zensical.toml's `nav`.

    A chapter's section holds the chapter, the folders of the lessons that begin there, and the
    chapter's further pages in the order in which the chapter links to them.

    Args:
        language: "ja" or "en".
        titles: Title of each page, by the page's path in the site.
    """
    words, first, guide = WORDS[language], ["index.md", "map.md"], []
    shown = {*first}
    for chapter in chapters():
        text = (ROOT / f"docs/lessons/{chapter}.md").read_text(encoding="utf-8")
        places = [f"lessons/{chapter}/index.md",
                  *(f"folders/{lesson.folder}.md" for lesson in lessons()
                    if lesson.chapters[0] == chapter),
                  *sorted((name for name in titles if name.startswith(f"lessons/{chapter}_")),
                          key=lambda name: text.find(f"({Path(name).name}"))]
        guide.append({titles[places[0]]: [{Path(name).stem if name.startswith("folders/")
                                           else titles[name]: name} for name in places]})
        shown |= {*places}
    more = [*MORE, *(name for name in titles if name not in {*MORE, *shown})]
    return [*({titles[name]: name} for name in first), {words["guide"]: guide},
            {words["more"]: [{titles[name]: name} for name in more]}]


def columns(block: re.Match) -> str:
    """Return the beginning of a PLAIN code block, marked if its lines must not wrap."""
    marked = len(COLUMNS.findall(block[2])) > 1
    return f"{block[1]}{' { .text .columns }' if marked else ''}\n{block[2]}"


class Site:
    """Sources of the site in one language.

    Args:
        language: "ja" or "en".
        folder: Folder to write the sources to.
    """

    def __init__(self, language: str, folder: Path) -> None:
        self.language, self.folder = language, folder
        self.pages = pages(language)
        self.places = {source: place for place, source in self.pages.items()}
        other = pages("en" if language == "ja" else "ja")
        self.others = {source: place for place, source in other.items()}
        self.sources: set[str] = set()  # files that get a page with their lines

    def write(self) -> None:
        """Write all pages and Zensical's configuration."""
        titles = {}
        for place, source in self.pages.items():
            text = (ROOT / source).read_text(encoding="utf-8")
            title = re.search(r"^# (.*)$", text, re.MULTILINE)[1]
            titles[place] = title.replace("`", "")
            self.put(place, "".join(
                PLAIN.sub(columns, part) if part.lstrip().startswith("```")
                else self.converted(part, source, place) for part in FENCE.split(text)))
        for source in sorted(self.sources):
            language = {"py": "python", "toml": "toml", "json": "json"}.get(source.split(".")[-1])
            lines = (ROOT / source).read_text(encoding="utf-8")
            self.put(f"source/{source}.md", f"---\nsearch:\n  exclude: true\n---\n\n# {source}\n\n"
                     f"````{language or 'text'} linenums=\"1\"\n{lines}````\n")
        config = (ROOT / "site/zensical.toml").read_text(encoding="utf-8")
        for word, value in (("NAME", WORDS[self.language]["name"]), ("LANGUAGE", self.language)):
            config = config.replace(f"@{word}@", value)
        entries = json.dumps(navigation(self.language, titles), ensure_ascii=False)
        config = config.replace("@NAV@", re.sub(r'{("(?:[^"\\]|\\.)*"): ', r"{\1 = ", entries))
        (self.folder / "zensical.toml").write_text(config, encoding="utf-8")
        for name in ("extra.css", "extra.js"):
            shutil.copy(ROOT / "site" / name, self.folder / "docs" / name)

    def put(self, place: str, text: str) -> None:
        """Write a page to its path in the site."""
        path = self.folder / "docs" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def converted(self, text: str, source: str, place: str) -> str:
        """Return a page's text without markers and with links that work in the site.

        Args:
            text: Text without code blocks.
            source: Path of the page in the repository.
            place: Path of the page in the site.
        """
        text = CODE.sub(r"\1\n{: .file }", text)
        text = REPLAY.sub(lambda match: match[0] + FRAME.format(
            self.language, WORDS[self.language]["replay"], match[1],
            self.target(match[2], source, place)), text)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        if self.language == "ja":
            text = BROKEN.sub("", text)
        return LINK.sub(lambda match: match[1] + self.target(match[2], source, place) + match[3],
                        text)

    def target(self, link: str, source: str, place: str) -> str:
        """Return the site's address for a page's link, and copy the file that it leads to.

        Args:
            link: Link as the page has it.
            source: Path of the page in the repository.
            place: Path of the page in the site.

        Raises:
            SystemExit: The link leads to no file.
        """
        path, _, anchor = link.partition("#")
        if "://" in link or not path:
            return link
        there = os.path.normpath(PurePosixPath(source).parent / path)
        anchor = f"#{anchor}" if anchor else ""
        up = os.path.relpath(".", PurePosixPath(place).parent)
        if there in self.places:
            return f"{up}/{self.places[there]}{anchor}"
        if there.endswith(".md"):  # a page in the other language
            plain = there.replace(".ja.md", ".md")
            other = "en" if self.language == "ja" else "ja"
            name = self.others.get(own(plain, other))
            if name:
                return f"{up}/../{other}/{name.removesuffix('.md')}.html{anchor}"
        file = ROOT / there
        if file.is_dir():  # stands for its first file
            file = min(path for path in file.iterdir() if path.is_file())
            there = file.relative_to(ROOT).as_posix()
        if file.parent.name == "replays" and file.suffix == ".json":  # the data of one
            page = self.folder / "docs/files" / there
            page.parent.mkdir(parents=True, exist_ok=True)
            page.with_suffix(".html").write_text(
                replay.page_of(file.read_text(encoding="utf-8")), encoding="utf-8")
            return f"{up}/files/{there.removesuffix('.json')}.html"
        if file.suffix in (".png", ".svg", ".html") and file.is_file():
            copy = self.folder / "docs/files" / there
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
            return f"{up}/files/{there}"
        if file.is_file() and file.stat().st_size < LARGEST:
            self.sources.add(there)
            line = re.sub(r"^#L(\d+)$", r"#__codelineno-0-\1", anchor)
            return f"{up}/source/{there}.md{line}"
        raise SystemExit(f"error: {source}: {link} leads nowhere in the site")


def fetch_scripts(folder: Path) -> None:
    """Fetch the scripts and their licenses into a folder."""
    if shutil.which("npm") is None:
        raise SystemExit("error: npm is missing: it fetches the script that draws the diagrams. "
                         "Install Node.js.")
    for package, file, name in SCRIPTS:
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True,
                           stdout=subprocess.DEVNULL)
            with tarfile.open(next(Path(place).glob("*.tgz"))) as archive:
                for inside, there in ((file, name), ("LICENSE", f"{name}.LICENSE")):
                    (folder / there).write_bytes(archive.extractfile(f"package/{inside}").read())


def finish(folder: Path) -> None:
    """Adapt Zensical's output to files that are opened without a server.

    The pages link to the other language's site and load the search worker from their own site.
    Empty links and links that only a server can follow disappear. The Japanese search speaks
    Japanese.

    Raises:
        SystemExit: The theme's script lacks a text of the search.
    """
    def same_page(match: re.Match) -> str:
        there = OUT / match[1] / page.relative_to(folder)
        there = there if there.exists() else OUT / match[1] / "index.html"
        return os.path.relpath(there, page.parent)

    for page in folder.rglob("*.html"):
        up = os.path.relpath(folder, page.parent)
        text = SHIM.sub(f"{up}/scripts/iframe-worker.js", page.read_text(encoding="utf-8"))
        text = ALTERNATE.sub("", EMPTY_LINK.sub("", text))
        page.write_text(SWITCH.sub(same_page, text), encoding="utf-8")
    if folder.name == "ja":
        script = next(folder.glob("assets/javascripts/bundle.*.js"))
        text = script.read_text(encoding="utf-8")
        for english, japanese in SEARCH.items():
            if english not in text:
                raise SystemExit(f"error: {script.name} has no {english}: adapt SEARCH in "
                                 "site/build.py to this version of zensical.")
            text = text.replace(english, japanese)
        script.write_text(text, encoding="utf-8")


def main() -> None:
    """Write both sites, and a start page that leads to the Japanese site."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        scripts = Path(place, "scripts")
        scripts.mkdir()
        fetch_scripts(scripts)
        for language in WORDS:
            folder = Path(place, language)
            Site(language, folder).write()
            shutil.copytree(scripts, folder / "docs/scripts")
            zensical = Path(sys.executable).parent / "zensical"
            subprocess.run([zensical, "build", "--clean"], cwd=folder, check=True)
            shutil.copytree(folder / "site", OUT / language)
    for language in WORDS:
        finish(OUT / language)
    (OUT / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>{WORDS["ja"]["name"]}</title>'
        '<meta http-equiv="refresh" content="0; url=ja/index.html">'
        '<a href="ja/index.html">日本語</a> <a href="en/index.html">English</a>\n',
        encoding="utf-8")
    print(f"site: {os.path.relpath(OUT / 'index.html')}")


if __name__ == "__main__":
    main()
