"""The documentation as a site: no warning, a place for every page, and nothing from another host."""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support import chromium

ROOT = Path(__file__).parents[1]
FOREIGN = re.compile(r"(?:https?:)?//[\w.-]+")
LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
FETCHES = {
    'class="mermaid"': "Material fetches it for a diagram",
    'data-md-component="source"': "it asks a forge for stars",
}
"""What makes the theme's own script ask another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "built"
    environment = os.environ | {"SLIPSTREAM_PYTHON": sys.executable}
    command = ["bash", "scripts/docs.sh", "--to", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=350)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a browser fetches for a page by itself, and the text of its paragraphs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.paragraphs: list[str] = []
        self._in_paragraph = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "p":
            self._in_paragraph = True
            self.paragraphs.append("")
        if tag != "link" or LOADED_LINKS & set(given.get("rel", "").split()):
            names = (
                "src",
                "srcset",
                "poster",
                "style",
                "data",
                *(("href",) if tag in ("link", "image", "use") else ()),
            )
            self.fetched += [given[name] for name in names if given.get(name)]

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.paragraphs[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._in_paragraph = self._in_paragraph and tag != "p"


def foreign(file: Path) -> list[str]:
    """Other hosts that a browser would ask for this file's sake, as far as its text says so."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".html":
        found = [host for each in Page(text).fetched for host in FOREIGN.findall(each)]
        return found + [f"{mark}: {why}" for mark, why in FETCHES.items() if mark in text]
    found = re.findall(r"url\(([^)]*)\)|@import ([^;]*)|<(?:image|use)[^>]*href=\"([^\"]*)\"", text)
    addresses = [each.strip("'\" ") for groups in found for each in groups]
    return [host for each in addresses if not each.startswith("data:") for host in FOREIGN.findall(each)]


def test_a_browser_loads_nothing_from_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert len(files) > 50
    assert {str(file.relative_to(site)): found for file in files if (found := foreign(file))} == {}


def test_tables_and_lists_are_rendered_as_such(site: Path) -> None:
    """What is a list on a forge needs an empty line before it here."""
    lost = []
    for page in site.rglob("*.html"):
        paragraphs = Page(page.read_text(encoding="utf-8")).paragraphs
        raw = [text for text in paragraphs if re.search(r"^(\||- |\d+\. |#+ |```)", text, re.MULTILINE)]
        lost += [f"{page.relative_to(site)}: {text[:80]}" for text in raw]
    assert lost == []


def test_numbered_lists_are_whole(site: Path) -> None:
    """Tables and code inside of an item do not end its list."""
    split = []
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        name = page.relative_to(ROOT / "docs").with_suffix("")
        built = site / (name.parent if name.name == "README" else name) / "index.html"
        begun, lists = len(re.findall(r"^1\. ", text, re.MULTILINE)), built.read_text(encoding="utf-8").count("<ol>")
        split += [f"{page.name}: {lists} lists of {begun}"] if begun != lists else []
    assert split == []


def test_code_in_a_table_is_as_it_is_written(site: Path) -> None:
    assert "(waited|waits)" in (site / "faults" / "index.html").read_text(encoding="utf-8")


def test_the_search_has_keys_codes_and_metrics(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = {entry["location"].partition("#")[0]: "" for entry in index}
    for entry in index:
        found[entry["location"].partition("#")[0]] += entry["title"] + entry["text"]
    for page, words in {
        "configuration/": ("replay.async_lag", "weight_bus.deadline_s"),
        "reference/metrics/": ("actor/ppo_kl", "weight_sync/seconds"),
        "reference/errors/": ("SLIP", "Remedy"),
    }.items():
        assert [word for word in words if word not in found[page]] == []


def test_the_text_of_pictures_lies_inside_of_them(tmp_path: Path) -> None:
    program = chromium.find()
    if program is None:
        pytest.skip(chromium.MISSING)
    outside = """[...document.querySelectorAll('text')].filter(each => {
        const box = each.getBBox(), [,, width, height] = document.documentElement.getAttribute('viewBox').split(' ')
        return box.x < 8 || box.y < 8 || box.x + box.width > width - 8 || box.y + box.height > height - 4
    }).map(each => each.textContent)"""
    drawn = sorted((ROOT / "docs").rglob("*.svg"))
    with chromium.Chromium(program, tmp_path) as browser:
        for file in drawn:
            browser.open(file.as_uri())
            assert browser.run("document.querySelectorAll('text').length") > 10, file.name
            assert browser.run(outside) == [], file.name
            colours = []
            for dark in (False, True):
                browser.look(1000, 600, dark=dark)
                parts = "[document.querySelector('rect'), document.querySelector('text')]"
                colours.append(browser.run(f"{parts}.map(each => getComputedStyle(each).fill)"))
            light, dark_card = colours
            assert set(light).isdisjoint(dark_card), f"{file.name} is the same for readers of dark pages"
    assert len(drawn) >= 5


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_reader_searches_and_sees_pictures(address: str, tmp_path: Path) -> None:
    program = chromium.find()
    if program is None:
        pytest.skip(chromium.MISSING)
    with chromium.Chromium(program, tmp_path) as browser:
        browser.look(1200, 900)
        browser.open(f"{address}concepts/")
        browser.until("[...document.images].length >= 4 && [...document.images].every(each => each.naturalWidth > 0)")
        browser.run("document.querySelector('[data-md-component=search-query]').focus()")
        browser.call("Input.insertText", text="async_lag")
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="g")
        browser.until("document.querySelector('.md-search-result__link[href*=\"configuration/\"]')")
        sent = [event["params"]["request"]["url"] for event in browser.events if "request" in event.get("params", {})]
        assert len(sent) > 5 and [url for url in sent if not url.startswith((address, "data:", "blob:"))] == []
        assert browser.errors() == []
