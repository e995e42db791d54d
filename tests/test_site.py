"""The site of the pages: its links lead somewhere, it is found in and drawn in a browser, offline."""

import html
import importlib.util
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.helpers import ROOT

pytestmark = [pytest.mark.skipif(not shutil.which("npm"), reason="needs npm"), pytest.mark.slow]
SHOWN = ("ja/index.html", "ja/lessons/6_5/index.html", "ja/lessons/6_4/index.html", "en/lessons/6_7/index.html", "en/faults.html",
         "ja/source/rpc_rl/main.py.html", "ja/files/docs/results/replays/rpc_rnn.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("build", ROOT / "site/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    build.OUT = tmp_path_factory.mktemp("site") / "out"
    build.main()
    return build.OUT


def test_every_link_leads_somewhere(site):
    texts = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: {unquote(name) for name in re.findall(r'\b(?:id|name)="([^"]+)"', text)}
               for path, text in texts.items()}
    lost = []
    for path, text in texts.items():
        article = text[text.find("<article"):text.find("</article>")]
        for link in re.findall(r'(?:href|src)="([^"]+)"', article):
            place, _, anchor = link.partition("#")
            if "://" in link or link.startswith(("data:", "mailto:")):
                continue
            there = (path.parent / unquote(place)).resolve() if place else path
            if not there.exists() or (anchor and there in anchors and unquote(anchor) not in anchors[there]):
                lost.append((str(path.relative_to(site)), link))
    assert lost == []


def test_lines_of_code_stay_lines(site):
    """In Japanese text lines are joined, without a space; not in a block of code, also of a list."""
    lost = []
    for page in sorted((ROOT / "docs/lessons").glob("*.md")):
        name, _, language = page.stem.partition(".")
        place = site / (language or "en") / "lessons" / name
        text = (place / "index.html" if place.is_dir() else place.with_suffix(".html")).read_text()
        shown = {line.strip() for block in re.findall(r"<code[^>]*>(.*?)</code>", text, re.DOTALL)
                 for line in html.unescape(re.sub("<.*?>", "", block)).splitlines()}
        blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
        lost += [line for language, block in blocks if language != "mermaid"
                 for line in block.splitlines() if line.strip() not in shown | {""}]
    assert lost == []


@pytest.mark.parametrize(("language", "other"), [("ja", "en"), ("en", "ja")])
def test_the_other_language_of_a_page(language, other, site):
    pages = [path for path in (site / language).rglob("*.html") if path.relative_to(site).parts[1] != "files"]
    for path in pages:
        there = re.search(rf'href="([^"]+)" hreflang="{other}" class="md-select__link"', path.read_text())[1]
        same = site / other / path.relative_to(site / language)
        assert (path.parent / there).resolve() == (same if same.exists() else site / other / "index.html").resolve(), path


def test_navigation(site):
    """The order is that of the chapters; a chapter's folders and further pages stand below it."""
    text = (site / "en/index.html").read_text()
    links = re.findall(r'href="\./((?:lessons|folders)/\w+)[./][^"]*" class="md-nav__link', text)
    order = list(dict.fromkeys(Path(link).name for link in links))
    assert order[:3] == ["6_1", "6_2", "model_parallel_resnet"]
    assert [name for name in order if re.fullmatch(r"6_\d|transformer", name)] == [*(f"6_{n}" for n in range(1, 10)), "transformer"]
    assert order[order.index("6_4"):order.index("6_5")] == ["6_4", "p2p_collectives", "6_4_more"]
    assert order[order.index("transformer"):][:4] == ["transformer", "transformer_parallel", "transformer_data", "transformer_zero"]


@pytest.mark.parametrize("width", [390, 1400, 1800])
def test_in_a_browser(width, site, chromium):
    for page in SHOWN:
        shown, said = chromium.new_page(viewport={"width": width, "height": 900}), []
        shown.on("console", lambda message, said=said: said.append(message.text))
        shown.on("requestfailed", lambda request, said=said: said.append(request.url))
        shown.goto(f"file://{site}/{page}")
        if shown.locator(".mermaid").count():
            shown.wait_for_timeout(2000)  # until it is drawn, in a shadow tree that cannot be looked into
            heights = shown.locator(".mermaid").evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")
            assert min(heights) > 100, page
        assert shown.evaluate("document.documentElement.scrollWidth") <= width, page
        assert said == [], page
        if page.startswith("ja/lessons/"):  # in the page's language
            assert shown.frame_locator(".replay").first.locator("#language").inner_text() == "English"
        if "/source/" in page:  # each number is beside its line
            first, last = ([shown.locator(f"{place} >> nth={line}").bounding_box()["y"] for place in (".linenodiv pre > span", ".code code > span")]
                           for line in (0, -1))
            assert abs(last[0] - first[0] - last[1] + first[1]) < 4, page
        if "/lessons/" in page:  # on a wide screen, the code is at the right of its text
            text, code = (shown.locator(f".md-content__inner > {what}").first.bounding_box() for what in ("p", ".highlight"))
            assert (code["x"] > text["x"] + text["width"]) == (width == 1800), page
        shown.close()


def test_no_page_scrolls_sideways(site, chromium):
    """On a phone: all pages, but one of a program stands for all, and the English replays for the Japanese."""
    wide = {}
    for scripts in (False, True):  # a replay needs them; the others are read faster without
        page = chromium.new_page(viewport={"width": 400, "height": 900}, java_script_enabled=scripts)
        for path in sorted(site.glob("en/files/**/*.html" if scripts else "??/**/*.html")):
            place = path.relative_to(site)
            if scripts or place.parts[1] not in ("files", "source") or str(place) in SHOWN:
                page.goto(f"file://{path}")
                width = page.evaluate("document.documentElement.scrollWidth")
                wide |= {str(place): width} if width > 400 else {}
        page.close()
    assert wide == {}


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """Deque's axe, which looks for what keeps people with a screen reader or a keyboard out."""
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "pack", "--silent", "axe-core@4.10.3"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_no_serious_fault(scheme, width, site, chromium, axe):
    for name in (SHOWN[0], SHOWN[1], SHOWN[5], SHOWN[6], "ja/map.html"):  # one of each kind: axe looks at every element
        page = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        page.goto(f"file://{site}/{name}")
        page.wait_for_timeout(1000)  # its header fades in
        page.evaluate(axe)
        found = page.evaluate("axe.run(document, {preload: false, resultTypes: ['violations']})")["violations"]
        assert [(fault["id"], fault["nodes"][0]["html"]) for fault in found
                if fault["impact"] in ("serious", "critical")] == [], name
        page.close()


@pytest.mark.parametrize("word", ["分散自動微分", "RRef"])
def test_search(word, site, chromium):
    page = chromium.new_page()
    page.goto(f"file://{site}/ja/index.html")
    page.wait_for_timeout(1000)
    page.keyboard.press("Control+k")
    page.wait_for_timeout(500)
    page.keyboard.type(word)
    found = page.get_by_text(re.compile(r"^\d+件$"))
    found.wait_for(timeout=10_000)
    assert int(found.inner_text().removesuffix("件")) > 5
    page.close()
