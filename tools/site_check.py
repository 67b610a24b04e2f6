"""Check of the built documentation in a browser, headless Chromium.

    python -m tools.site_check docs/_build/html                    # name each fault, and fail
    python -m tools.site_check docs/_build/html --screenshots DIR  # and keep a picture of each page

`make site-check` runs it. Each page is opened 1400 and 390 pixels wide, light and dark. Faults:
what the browser writes to its console, a link or picture that leads nowhere, a page or an element
wider than the window, a table of which a phone shows too little, a page that is too tall,
code that is hard to read or cannot be copied, a search without results.
Needs the package ``playwright`` and the program ``chromium``, on Debian the package of that name.
"""

import argparse
import functools
import http.server
import itertools
import shutil
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = (1400, 390)
"""Of a window and of a phone."""
SCHEMES = ("light", "dark")
TALLEST = 7000
"""Of a page at 1400 pixels, in pixels."""
MAY_BE_TALL = ("genindex.html", "_modules/")
"""Pages that nobody reads from top to bottom: the index of names, and sources."""
SECOND_COLUMN = 0.67
"""Where the second column of a table begins at most, as a share of the width of a phone."""
LEAST_CONTRAST = 4.5
"""Of code with its ground, WCAG 2 AA."""
QUERY = "checkpoint"
"""Typed into the search; any documentation of this package has results for it."""

EXAMINE = """
async ([width, leastContrast, secondColumn]) => {
  const faults = [];
  const name = (e) => e.tagName.toLowerCase() + (e.className ? '.' + e.className : '') + ' ' +
    (e.innerText || e.getAttribute('src') || '').trim().replace(/\\s+/g, ' ').slice(0, 40);
  const root = document.documentElement;
  if (root.scrollWidth > width) faults.push(`the page is ${root.scrollWidth} px wide`);
  const scrolls = (e) => {
    for (let p = e.parentElement; p && p !== document.body; p = p.parentElement) {
      const style = getComputedStyle(p);
      if (['auto', 'scroll', 'hidden'].includes(style.overflowX) || style.position === 'fixed')
        return true;
    }
    return false;
  };
  for (const e of document.querySelectorAll('article *')) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !scrolls(e))
      faults.push(`${name(e)} ends at ${Math.round(box.right)} px`);
  }
  for (const table of secondColumn ? document.querySelectorAll('article table') : []) {
    const second = [...table.querySelectorAll('tr > td:nth-child(2)')];
    const left = Math.round(Math.max(...second.map((e) => e.getBoundingClientRect().left)));
    if (left > secondColumn * width)
      faults.push(`the second column of ${name(table)} begins at ${left} px`);
  }
  for (const e of document.images) {
    e.loading = 'eager';
    try { await e.decode(); } catch { faults.push(`${e.getAttribute('src')} is not a picture`); }
  }
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const dim = new Set();
  for (const pre of document.querySelectorAll('article pre')) {
    if (!pre.offsetParent) continue;
    const copied = pre.parentElement.querySelector('button.copybtn');
    if (!copied && !location.pathname.includes('/_modules/'))
      faults.push(`code without a copy button: ${name(pre)}`);
    for (const e of [pre, ...pre.querySelectorAll('span')]) {
      if (!e.innerText.trim()) continue;
      const ink = light(parse(getComputedStyle(e).color));
      const pair = [ink, light(ground(e))].sort((a, b) => a - b);
      const contrast = (pair[1] + 0.05) / (pair[0] + 0.05);
      if (contrast < leastContrast) dim.add(`${e.className || 'code'} ${contrast.toFixed(1)}`);
    }
  }
  for (const each of dim) faults.push(`contrast of code: ${each}`);
  const links = [...document.querySelectorAll('a[href]')].map((a) => a.href);
  const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  return {faults: [...new Set(faults)], links: [...new Set(links)], ids, height: root.scrollHeight};
}
"""
"""What is wrong with the open page, its links and its anchors."""


def find_browser() -> str | None:
    """Return the path of Chromium or Chrome, ``None`` if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def check(folder: Path, screenshots: Path | None = None) -> list[str]:
    """Return the faults of all pages in `folder`, each with its page."""
    from playwright.sync_api import sync_playwright

    program = find_browser()
    if program is None:
        raise FileNotFoundError("no browser: install chromium, for example by apt-get")
    pages = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.html"))
    with served(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            return _Check(browser, address, pages, screenshots).run()
        finally:
            browser.close()


class _Check:
    def __init__(self, browser: Any, address: str, pages: list[str], to: Path | None) -> None:
        self._browser, self._address, self._pages, self._to = browser, address, pages, to
        self._faults: dict[str, None] = {}
        self._links: dict[str, set[str]] = {}
        self._ids: dict[str, set[str]] = {}

    def run(self) -> list[str]:
        tab = self._browser.new_page()
        said: list[str] = []
        tab.on("console", lambda m: said.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda error: said.append(str(error)))
        for page in self._pages:
            tab.goto(self._address + page)
            for view in itertools.product(WIDTHS, SCHEMES):
                self._look(tab, page, *view)
            for text in said:
                self._add(f"{page}: console: {text}")
            said.clear()
        if "search.html" in self._pages:
            self._search(tab)
        self._follow()
        return list(self._faults)

    def _look(self, tab: Any, page: str, width: int, scheme: str) -> None:
        """Examine the open page at one width, light or dark."""
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme)
        is_phone = width == WIDTHS[-1]
        seen = tab.evaluate(EXAMINE, [width, LEAST_CONTRAST, SECOND_COLUMN if is_phone else 0])
        for fault in seen["faults"]:
            self._add(f"{page} ({width} px, {scheme}): {fault}")
        may_be_tall = page.startswith(MAY_BE_TALL)
        if width == WIDTHS[0] and seen["height"] > TALLEST and not may_be_tall:
            self._add(f"{page}: {seen['height']} px tall, at most {TALLEST} are allowed")
        self._links[page], self._ids[page] = set(seen["links"]), set(seen["ids"])
        if self._to is not None:
            name = f"{page.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
            tab.screenshot(path=self._to / name, full_page=seen["height"] < 12_000)

    def _search(self, tab: Any) -> None:
        """Type a query, as a reader does, and wait for results."""
        tab.goto(self._address + "index.html")
        tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
        tab.fill(".sidebar-search", QUERY)
        tab.press(".sidebar-search", "Enter")
        try:
            tab.wait_for_selector("ul.search li a", timeout=10_000)
        except Exception as error:
            self._add(f"search.html: no results for {QUERY!r}: {type(error).__name__}")

    def _follow(self) -> None:
        """Find links to pages, files and anchors of this site that are not there."""
        for page, links in self._links.items():
            for link in sorted(links):
                if not link.startswith(self._address):
                    continue
                path, _, anchor = link.removeprefix(self._address).partition("#")
                path = urllib.parse.unquote(path.partition("?")[0]) or "index.html"
                anchor = urllib.parse.unquote(anchor)
                if path not in self._ids and not self._is_file(path):
                    self._add(f"{page}: link to {path}, which is missing")
                elif anchor and anchor not in self._ids.get(path, {anchor}):
                    self._add(f"{page}: link to {path}#{anchor}: no such anchor")

    def _is_file(self, path: str) -> bool:
        try:
            urllib.request.urlopen(self._address + urllib.parse.quote(path), timeout=10).close()
        except OSError:
            return False
        return True

    def _add(self, fault: str) -> None:
        self._faults[fault] = None


def main() -> int:
    """Print the faults, and return 1 where there is one."""
    parser = argparse.ArgumentParser(description="check built documentation in a browser")
    parser.add_argument("folder", type=Path, help="the built pages, for example docs/_build/html")
    parser.add_argument(
        "--screenshots", type=Path, metavar="DIR", help="keep pictures of all pages"
    )
    arguments = parser.parse_args()
    if not (arguments.folder / "index.html").exists():
        parser.error(f"{arguments.folder} has no index.html: run make docs first")
    if arguments.screenshots is not None:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    faults = check(arguments.folder, arguments.screenshots)
    print(*faults, sep="\n", end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
