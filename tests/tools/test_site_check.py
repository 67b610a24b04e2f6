"""The check of the built pages in a browser finds each kind of fault, and nothing else."""

import pytest

from tools import site_check

pytest.importorskip("playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(site_check.find_browser() is None, reason="needs chromium"),
]

HEAD = (
    '<!doctype html><meta name="viewport" content="width=device-width"><link rel=icon href=data:,>'
)
SOUND = f"""{HEAD}<article><h1 id=top>Title</h1>
<a href="#top">up</a> <a href="other.html#there">other</a> <a href="file.txt">file</a>
<div style="overflow-x: auto"><table><tr><td><div style="width: 2000px">wide</div></table></div>
<div><pre style="overflow-x: auto">x = 1</pre><button class=copybtn>copy</button></div>
</article>"""

FAULTS = {
    '<a href="gone.html">x</a>': "link to gone.html, which is missing",
    '<a href="other.html#gone">x</a>': "link to other.html#gone: no such anchor",
    '<img src="gone.png">': "gone.png is not a picture",
    '<table><tr><td><div style="width: 900px">x</div></table>': "(390 px, light): the page is",
    "<table><tr><td><div style='width: 300px'>x</div><td>y</table>": "the second column of table",
    '<div style="height: 8000px">x</div>': "px tall, at most 7000 are allowed",
    "<script>undefined_function()</script>": "console: undefined_function is not defined",
    "<pre>x = 1</pre>": "code without a copy button: pre x = 1",
    '<div><pre style="color: #999">x</pre><button class=copybtn></button></div>': "code 2.8",
}


@pytest.fixture
def site(tmp_path):
    (tmp_path / "index.html").write_text(SOUND)
    (tmp_path / "other.html").write_text(f"{HEAD}<article><p id=there>x</article>")
    (tmp_path / "file.txt").write_text("x")
    return tmp_path


def test_each_fault_is_named_with_its_page_and_sound_pages_have_none(site):
    for number, fault in enumerate(FAULTS):
        (site / f"fault{number}.html").write_text(f"{HEAD}<article>{fault}</article>")
    lines = site_check.check(site)
    for number, text in enumerate(FAULTS.values()):
        assert any(line.startswith(f"fault{number}.html") and text in line for line in lines), text
    assert [line for line in lines if not line.startswith("fault")] == []


def test_a_search_without_results_is_a_fault(site):
    form = "<form action=search.html><input class=sidebar-search name=q></form>"
    (site / "index.html").write_text(HEAD + form)
    (site / "search.html").write_text(f"{HEAD}<ul class=search></ul>")
    assert [line for line in site_check.check(site) if "no results" in line]
    (site / "search.html").write_text(f"{HEAD}<ul class=search><li><a href=#>x</a></ul>")
    assert site_check.check(site) == []


def test_pictures_of_pages_are_kept(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    site_check.check(site, folder)
    names = {
        f"{page}-{w}-{s}.png"
        for page in ("index", "other")
        for w in (390, 1400)
        for s in ("light", "dark")
    }
    assert {path.name for path in folder.iterdir()} == names
