"""Looks at a page: its elements, and what a real browser makes of it."""

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.browser import QUIET, a_browser, browser_path

# Where scripts/browser.sh puts axe-core.
AXE = Path(os.environ.get("FROSTLINE_AXE") or Path(__file__).parents[2] / "build" / "axe" / "axe.min.js")
IS_DARK = "--blink-settings=preferredColorScheme=0"
HOSTILE = (
    "</text></svg><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">$\\alpha$&\x07"
)


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.attributes = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]


def browse(tmp_path, page, *options):
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    return visit(tmp_path, path.as_uri(), *options).stdout


def needed_browser():
    path = browser_path()
    if path is None:
        pytest.skip("no Chromium here: see scripts/browser.sh")
    return path


def visit(tmp_path, address, *options):
    """What a browser says of an address, and on ``stderr`` what its console has, if it is asked to log."""
    command = [needed_browser(), *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *options, address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)


def asks_for_nothing(page):
    """The page has no script and no address outside itself."""
    elements = Elements(page)
    outside = {"script", "link", "img", "iframe", "object", "image", "base"} & set(elements.tags)
    addresses = [value for name, value in elements.attributes if name in {"href", "xlink:href", "src"}]
    return (
        not outside
        and not re.search(r"https?:|//[a-z]|@import", page)
        and all(value.startswith("#") for value in addresses)
        and set(re.findall(r"url\((.)", page)) <= {"#"}
    )


def has_every_target_once(page):
    """Whatever the page refers to within itself is there, under a name of its own."""
    ids = Elements(page).ids
    wanted = set(re.findall(r"(?:href=\"#|url\(#|aria-labelledby=\")([^\")]+)", page))
    return len(ids) == len(set(ids)) and wanted <= set(ids)


def has_colours_of_its_own(page):
    """Every drawing takes its colours from the page, which has them for day, night and paper."""
    schemes = "prefers-color-scheme: dark" in page and "@media print" in page
    return "var(--store)" in page and not re.search(r"(fill|stroke): #", page) and schemes


def has_inline_pictures_alone(page):
    """Every picture is in the page itself."""
    elements = Elements(page)
    sources = [value for name, value in elements.attributes if name == "src"]
    return elements.tags.count("img") == len(sources) and all(
        re.fullmatch(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+", source) for source in sources
    )


def overlapping_labels(tmp_path, page):
    """Pairs of labels of one drawing that lie on each other, as a browser lays them out."""
    # The browser runs no script of a page with this policy, so that the question goes into a copy without it.
    open_page = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    dom = browse(
        tmp_path,
        open_page.replace("</body>", f"<pre id='found'></pre><script>{_OVERLAPS}</script></body>"),
        "--dump-dom",
    )
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    return json.loads(html.unescape(found))


_OVERLAPS = """
const found = [];
let labels = 0;
for (const drawing of document.querySelectorAll("figure svg")) {
  const texts = [...drawing.querySelectorAll("text")].filter(text => text.textContent.trim());
  labels += texts.length;
  const boxes = texts.map(text => [text.textContent.trim(), text.getBoundingClientRect()]);
  boxes.forEach(([name, box], place) => boxes.slice(place + 1).forEach(([other, next]) => {
    const wide = Math.min(box.right, next.right) - Math.max(box.left, next.left);
    const high = Math.min(box.bottom, next.bottom) - Math.max(box.top, next.top);
    if (wide > 0.5 && high > 3) found.push([name, other]);
  }));
}
document.getElementById("found").textContent = JSON.stringify({found, labels});
"""


def runs_nothing(page):
    """No name brought an element or an event handler with it."""
    elements = Elements(page)
    handlers = [name for name, _ in elements.attributes if name.startswith("on")]
    return not {"script", "img"} & set(elements.tags) and not handlers


def picture_of(tmp_path, page):
    """A browser's picture of the page: its size and how many colours it has."""
    from PIL import Image

    picture = tmp_path / "page.png"
    browse(tmp_path, page, f"--screenshot={picture}", "--window-size=1200,1600")
    with Image.open(picture) as image:
        return image.size, len(image.convert("RGB").getcolors(1 << 24))


def may_only_ask_its_server(answer):
    """Check the answer that gives a page: its policy, and that the page asks for nothing else."""
    policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"https?:|//[a-z]|@import|innerHTML|localStorage|sessionStorage|cookie", answer.text)
    assert not [name for name, _ in Elements(answer.text).attributes if name.startswith("on") or name == "style"]


def tells_readers_of_screens(page):
    """Check what a page of figures says beside what is seen."""
    elements = Elements(page)
    assert ("lang", "en") in elements.attributes
    assert elements.tags.count("h1") == elements.tags.count("main") == 1
    named = {value for name, value in elements.attributes if name in {"aria-labelledby", "for"}}
    assert named <= set(elements.ids)
    assert len(elements.ids) == len(set(elements.ids))
    assert ("role", "status") in elements.attributes
    for meter in re.findall(r'<div class="track" role="meter"[^>]*>', page):
        assert all(f"aria-{name}=" in meter for name in ("label", "valuemin", "valuemax", "valuenow"))
    assert "prefers-color-scheme: dark" in page
    assert ":focus-visible" in page


# A page of figures has drawn some, or asks for a token.
IS_DRAWN = "(typeof seen === 'object' && seen.length > 2) || !document.getElementById('ask').hidden"


def seen(tmp_path, address, *options, until=IS_DRAWN, for_ms=0):
    """What a page that is sent figures shows once an expression is true, and what its console has on ``stderr``."""
    needed_browser()
    with a_browser(tmp_path, *options) as page:
        page.visit(address)
        time.sleep(for_ms / 1000)
        page.until(until)
        said = page.dom()
    return SimpleNamespace(stdout=said, stderr="".join(f"CONSOLE {error}\n" for error in page.errors))


def typed_token(page, token):
    """A copy of the page in which a token is typed once it asks for one."""
    typing = (
        "const typing = setInterval(() => { if (document.getElementById('ask').hidden) return; clearInterval(typing);"
        f"document.getElementById('token').value = '{token}'; document.querySelector('#ask button').click(); }}, 50);"
    )
    return page.replace("</body>", f"<script>{typing}</script></body>")


# A page that was given a token has drawn some figures; one with axe-core has its title.
HAS_FIGURES = "seen.length > 2"
HAS_TITLE = "/^(light|dark|wide) /.test(document.title)"


def figures(dom):
    """Values of the page's figures, by their ids."""
    found = {}
    for attributes in re.findall(r"<data ([^>]*)>", dom):
        named = dict(re.findall(r'(\w+)="([^"]*)"', attributes))
        if named.get("value") and "id" in named:
            found[named["id"]] = float(named["value"])
    return found


def with_axe(page):
    """A copy of the page whose title tells what axe-core finds of weight; no policy may forbid its scripts."""
    if not AXE.is_file():
        pytest.skip("no axe-core here: see scripts/browser.sh")
    asking = (
        "const looking = setInterval(async () => { if (seen.length < 3) return; clearInterval(looking);"
        "const found = await axe.run(document); const bad = found.violations"
        ".filter(each => ['serious', 'critical'].includes(each.impact)).map(each => each.id);"
        "const scheme = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';"
        "document.title = `${scheme} ${found.passes.length} ${bad.join(' ')}`; }, 50);"
    )
    script = AXE.read_text(encoding="utf-8")
    return page.replace("</body>", f"<script>{script}</script><script>{asking}</script></body>")


def axe_findings(page):
    """What axe-core finds of weight on a driven page as it is now: names of rules, and how many others passed."""
    if not AXE.is_file():
        pytest.skip("no axe-core here: see scripts/browser.sh")
    page.value(f"{AXE.read_text(encoding='utf-8')};0")
    return page.value(
        "axe.run(document).then(found => [found.violations"
        ".filter(each => ['serious', 'critical'].includes(each.impact)).map(each => each.id), found.passes.length])"
    )


def sign_in(page, address, token):
    """Open a page of figures that asks for a token, give it one by keyboard, and wait until it has drawn some."""
    page.visit(address)
    page.until("!document.getElementById('ask').hidden && document.activeElement.id === 'token'")
    page.press(*token, "Enter")
    page.until("seen.length > 1")


def opened(page, what):
    """Open the form of a change by keyboard, and give back the labels of its fields."""
    page.until(f"!!document.querySelector('[aria-label=\"Change {what}\"]')")
    page.value(f"document.querySelector('[aria-label=\"Change {what}\"]').focus()")
    page.press("Enter")
    page.until("!!document.querySelector('dialog[open]')")
    return page.value("[...document.querySelectorAll('dialog label')].map(label => label.textContent)")


def typed_over(page, field, words):
    """Type over what a field of the open form says, and send it by keyboard."""
    page.value(f"document.getElementById('change_{field}').focus(), document.getElementById('change_{field}').select()")
    page.press(*words, "Enter")


def found_by_axe(dom):
    """What the title of such a page says: its colours, how many rules passed, and the names of those that did not."""
    title, *_ = re.findall("<title>(.*?)</title>", dom)  # those of drawings come later
    scheme, passed, *bad = title.split()
    return scheme, int(passed), bad
