"""Make a site of the pages, in both languages: static files that open from a folder, offline.

    python site/build.py                  `make site`: outputs/site/index.html

No text lives here. The README, each page of docs/, of the lessons and of the exercises become pages
of the Japanese and of the English site; a link to a program leads to a page with its lines.
Zensical builds both, with zensical.toml; what it would load from the network comes from the npm
registry: Mermaid, which draws the diagrams, and a worker for the search.
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
# From the npm registry: a package, its file, and the name of that in the site.
SCRIPTS = (("mermaid@11.17.2", "dist/mermaid.min.js", "mermaid.js"),
           ("iframe-worker@1.0.4", "shim/index.js", "iframe-worker.js"))
SHIM = re.compile(r'https://[^"]*/iframe-worker/shim')  # from where a page would load it
SWITCH = re.compile(r"https://(ja|en)\.invalid/")  # of zensical.toml: to a page's other language
ALTERNATE = re.compile(r'<link rel="alternate"[^>]*>')  # its sitemap would be asked for
# In front of each line of code; a screen reader would read them all. Programs' pages have numbers.
EMPTY_LINK = re.compile(r'<a id="__codelineno-\d+-\d+" name="[^"]*" href="[^"]*"></a>')
LINK = re.compile(r'<a id="__codelineno-\d+-\d+" name="[^"]*" href="[^"]*"></a>')
LESSONS = ("p2p_collectives", "ddp_basic", "model_parallel_resnet", "rpc_rl", "rpc_rnn",
           "param_server", "batch_rl", "ddp_rpc_hybrid", "transformer_parallel")
# In the order of docs/map.md.
GUIDE = ("6_4", "6_3", "6_2", "6_5", "6_6", "6_7", "6_8", "6_9", "transformer")
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
# The file of the code that follows.
CODE = re.compile(r"(?<=-->\n\n)(\[`.*`\]\(.*\))$(?=\n\n\Z)", re.MULTILINE)
# The line that leads to a replay, and what shows that below it.
REPLAY = re.compile(r"<!-- replay (\w+) -->\n.*?\]\((\S+?\.json)\).*?\n<!-- end -->", re.DOTALL)
FRAME = ('\n\n<iframe class="replay" name="{}" loading="lazy" title="{}: {}" src="{}">'
         "</iframe>\n")
WIDE = "[\u3001-\u30ff\u4e00-\u9fff\uff01-\uff5e]"  # a Japanese character
# Where a line is broken beside one, a space would show. What begins an item or a table stays.
BROKEN = re.compile(rf"(?<={WIDE})\n *(?![\s*|#<>{{-]|\d+\.)|(?<=[^\s|>])\n *(?={WIDE})")
LARGEST = 200_000  # bytes of a file that is shown with its lines
WORDS = {"ja": {"name": "PyTorch分散学習チュートリアル", "guide": "解説とレッスン", "more": "資料",
                "replay": "再生"},
         "en": {"name": "Distributed PyTorch tutorials", "guide": "Guide and lessons",
                "more": "More", "replay": "replay"}}


def pages(language):
    """The pages of a site: their paths there, with those of the repository."""
    found = {"index.md": own("README.md", language), "exercises.md": own("exercises/README.md",
                                                                         language)}
    for path in sorted(ROOT.glob("docs/**/*.md")):
        name = path.relative_to(ROOT).as_posix()
        if not name.endswith(".ja.md"):
            found[name.removeprefix("docs/")] = own(name, language)
    found |= {f"folders/{lesson.folder}.md": own(f"{lesson.folder}/README.md", language)
              for lesson in lessons()}
    found["contributing.md"] = "CONTRIBUTING.md"
    return found


def own(name, language):
    """The Japanese twin of a page, if this site is Japanese and there is one."""
    japanese = name.removesuffix(".md") + ".ja.md"
    return japanese if language == "ja" and (ROOT / japanese).exists() else name


def nav(language, titles):
    """What the site shows on its left: each chapter, with the lessons that begin there."""
    words, guide = WORDS[language], []
    chapters = sorted(name for name in titles if name.startswith("lessons/"))
    for chapter in chapters:
        guide += [chapter, *(f"folders/{lesson.folder}.md" for lesson in lessons()
                             if chapter == f"lessons/{lesson.chapters[0]}.md")]
    rest = [name for name in titles if name not in ["index.md", *guide]]
    return [{titles["index.md"]: "index.md"}, *(
        {words[group]: [{titles[name]: name} for name in names]}
        for group, names in (("guide", guide), ("more", rest)))]


class Site:
    """Writes the sources of the site of one language.

    Args:
        language: "ja" or "en".
        folder: where to.
    """

    def __init__(self, language, folder):
        self.language, self.folder = language, folder
        self.pages = pages(language)
        self.places = {source: place for place, source in self.pages.items()}
        other = pages("en" if language == "ja" else "ja")
        self.others = {source: place for place, source in other.items()}
        self.sources = set()  # programs that have a page

    def write(self):
        """Write all pages, and the configuration of Zensical."""
        titles = {}
        for place, source in self.pages.items():
            text = (ROOT / source).read_text(encoding="utf-8")
            title = re.search(r"^# (.*)$", text, re.MULTILINE)[1]
            titles[place] = title.replace("`", "")
            self.put(place, "".join(
                part if part.lstrip().startswith("```") else self.converted(part, source, place)
                for part in FENCE.split(text)))
        for source in sorted(self.sources):
            language = {"py": "python", "toml": "toml", "json": "json"}.get(source.split(".")[-1])
            lines = (ROOT / source).read_text(encoding="utf-8")
            self.put(f"source/{source}.md", f"---\nsearch:\n  exclude: true\n---\n\n# {source}\n\n"
                     f"````{language or 'text'} linenums=\"1\"\n{lines}````\n")
        config = (ROOT / "site/zensical.toml").read_text(encoding="utf-8")
        for word, value in (("NAME", WORDS[self.language]["name"]), ("LANGUAGE", self.language)):
            config = config.replace(f"@{word}@", value)
        entries = json.dumps(nav(self.language, titles), ensure_ascii=False)
        config = config.replace("@NAV@", re.sub(r'{("(?:[^"\\]|\\.)*"): ', r"{\1 = ", entries))
        (self.folder / "zensical.toml").write_text(config, encoding="utf-8")
        for name in ("extra.css", "extra.js"):
            shutil.copy(ROOT / "site" / name, self.folder / "docs" / name)

    def put(self, place, text):
        """Write a page."""
        path = self.folder / "docs" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def converted(self, text, source, place):
        """A text of a page without its markers, and with links that hold in the site."""
        text = CODE.sub(r"\1\n{: .file }", text)
        text = REPLAY.sub(lambda match: match[0] + FRAME.format(
            self.language, WORDS[self.language]["replay"], match[1],
            self.target(match[2], source, place)), text)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        if self.language == "ja":
            text = BROKEN.sub("", text)
        return LINK.sub(lambda match: match[1] + self.target(match[2], source, place) + match[3],
                        text)

    def target(self, link, source, place):
        """Where a link of a page leads in the site."""
        path, _, anchor = link.partition("#")
        if "://" in link or not path:
            return link
        there = os.path.normpath(PurePosixPath(source).parent / path)
        anchor = f"#{anchor}" if anchor else ""
        up = os.path.relpath(".", PurePosixPath(place).parent)
        if there in self.places:
            return f"{up}/{self.places[there]}{anchor}"
        if there.endswith(".md"):  # the same page in the other language
            plain = there.replace(".ja.md", ".md")
            other = "en" if self.language == "ja" else "ja"
            name = self.others.get(own(plain, other))
            if name:
                return f"{up}/../{other}/{name.removesuffix('.md')}.html{anchor}"
        file = ROOT / there
        if file.is_dir():  # its first file
            file = min(path for path in file.iterdir() if path.is_file())
            there = file.relative_to(ROOT).as_posix()
        if file.parent.name == "replays" and file.suffix == ".json":  # the data of one
            page = self.folder / "docs/files" / there
            page.parent.mkdir(parents=True, exist_ok=True)
            page.with_suffix(".html").write_text(replay.page_of(file.read_text(encoding="utf-8")))
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


def fetch_scripts(folder):
    """Fetch the scripts and their licences into a folder."""
    if shutil.which("npm") is None:
        raise SystemExit("error: make site needs npm, for the script that draws the diagrams")
    for package, file, name in SCRIPTS:
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True,
                           stdout=subprocess.DEVNULL)
            with tarfile.open(next(Path(place).glob("*.tgz"))) as archive:
                for inside, there in ((file, name), ("LICENSE", f"{name}.LICENSE")):
                    (folder / there).write_bytes(archive.extractfile(f"package/{inside}").read())


def mend(folder):
    """Let the pages of a site lead to those of the other one, and load the search from there.

    Empty links are taken out, and those that only a server could follow.
    """
    def same_page(match):
        there = OUT / match[1] / page.relative_to(folder)
        there = there if there.exists() else OUT / match[1] / "index.html"
        return os.path.relpath(there, page.parent)

    for page in folder.rglob("*.html"):
        up = os.path.relpath(folder, page.parent)
        text = SHIM.sub(f"{up}/scripts/iframe-worker.js", page.read_text(encoding="utf-8"))
        text = ALTERNATE.sub("", EMPTY_LINK.sub("", text))
        page.write_text(SWITCH.sub(same_page, text))


def main():
    """Write both sites, and a first page that leads to the Japanese one."""
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
        mend(OUT / language)
    (OUT / "index.html").write_text('<!doctype html><meta charset="utf-8"><title>'
                                    f'{WORDS["ja"]["name"]}</title><meta http-equiv="refresh" '
                                    'content="0; url=ja/index.html"><a href="ja/index.html">'
                                    '日本語</a> <a href="en/index.html">English</a>\n')
    print(f"site: {os.path.relpath(OUT / 'index.html')}")


if __name__ == "__main__":
    main()
