"""The pages in a real browser, opened from disk: they load nothing, sort, filter, and fit a phone."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from cpt.reporting import figures
from cpt.reporting.page import Block, write_page

KNOWN = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, KNOWN)), "")
MISSING = "no browser: apt-get install chromium to test the pages"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason=MISSING)]
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
)
LAPTOP, PHONE = (1280, 800), (390, 844)
PATIENCE = 60  # seconds
START = (  # the browser reads its commands from file 3 and answers in file 4
    "import fcntl, os, sys; high = [fcntl.fcntl(int(given), fcntl.F_DUPFD, 10) for given in sys.argv[1:3]]; "
    "os.dup2(high[0], 3); os.dup2(high[1], 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """A headless browser, driven by its debugging protocol over two pipes: messages end in a zero byte."""

    def __init__(self, profile):
        theirs, ours = os.pipe(), os.pipe()
        start = [sys.executable, "-I", "-c", START, str(theirs[0]), str(ours[1])]
        self.process = subprocess.Popen(
            [*start, BROWSER, *OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs[0], ours[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs[0])
        os.close(ours[1])
        self.out, self.inward = os.fdopen(theirs[1], "wb", buffering=0), os.fdopen(ours[0], "rb", buffering=0)
        self.rest, self.number, self.session, self.events = b"", 0, None, []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """The result of a command; what happens meanwhile is kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.out.write(json.dumps(message).encode() + b"\0")
        return self.until(lambda answer: answer.get("id") == self.number)["result"]

    def until(self, wanted):
        """Reads up to the message that is wanted."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            while b"\0" in self.rest:
                line, self.rest = self.rest.split(b"\0", 1)
                message = json.loads(line)
                self.events.append(message)
                if wanted(message):
                    return message
            read = os.read(self.inward.fileno(), 1 << 20)
            assert read, "the browser is gone"
            self.rest += read
        raise TimeoutError(f"no answer in {PATIENCE} s")

    def open(self, path, *, size):
        """Opens a page from disk in a window of a size, with nothing heard so far."""
        self.resize(size)
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        if not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.until(lambda event: event.get("method") == "Page.loadEventFired")

    def resize(self, size):
        shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
        self.send("Emulation.setDeviceMetricsOverride", **shape)

    def run(self, expression):
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def heard(self, *methods):
        return [event for event in self.events if event.get("method") in methods]

    def close(self):
        self.session = None
        self.send("Browser.close")
        self.process.wait(PATIENCE)
        self.out.close()
        self.inward.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


ROWS = [  # in no order by any column
    ["ncl", "tiny", "−0.5 ± 0.1", "1,200", "1.2e+05", "yes"],
    ["Das + migu", "tiny", "10.2 [9.0, 11.5]", "–", "9.1e+04", "no"],
    ["ewc", "large", "–", "55", "inf", "–"],
    ["das (order 10)", "large", "nan", "900", "2.0e+05", "no"],
    ["das (order 2)", "tiny", "9.75", "3", "–", "yes"],
]
HEAD = ["group", "model", "LC", "stored", "FLOPs", "domain known"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A comparison: two tables that are filtered, one that is not, a picture, a folded part, odd names."""
    facets = [{"method": row[0].split()[0].lower(), "model": row[1]} for row in ROWS]
    marks = {name: ([0.1 * place], [60.0]) for place, name in enumerate("abcdefgh")}
    picture = figures.draw_plane(marks, x="FG", y="LC")
    wide = [[f"part {place}", *map(str, np.arange(40) * 1.5)] for place in range(12)]
    tiles = [["learned", "0.830 nats", "[0.751, 0.909]", "improved", "Fall of the loss " * 4]] * 3
    blocks = [
        Block(head=["", "mean", "interval", "", "meaning"], cells=tiles, words=5, tiles=True),
        Block(title="masked: pubmed", head=HEAD, cells=ROWS, words=2, filtered=True, facets=facets),
        Block(title="Differences: acl", head=HEAD[:2], cells=[[r[0], "3"] for r in ROWS], filtered=True),
        Block(title="Trade-off", lines=["a" * 300], picture=picture),
        Block(title="Wide", head=["part", *map(str, range(40))], cells=wide, folded="12 x 40"),
        Block(title="</script><script>alert(1)</script>", lines=["<b>"], code="seed: 0\n" * 3, folded="yaml"),
        Block(head=["run", "trial"], cells=[["method", "x"], ["a", "y"]], words=2, sortable=False),
    ]
    return write_page(blocks, title="Comparison of runs", stem=tmp_path_factory.mktemp("page") / "comparison")


@pytest.fixture
def opened(browser, page):
    browser.open(page, size=LAPTOP)
    return browser


def column(browser, place, *, table=0):
    """The shown cells of a column."""
    rows = f"[...document.querySelectorAll('table')[{table}].tBodies[0].rows]"
    return browser.run(f"{rows}.filter(r => r.checkVisibility()).map(r => r.cells[{place}].textContent)")


def head(place, *, table=0):
    return f"document.querySelectorAll('table')[{table}].tHead.rows[0].cells[{place}]"


def test_a_page_from_disk_loads_nothing_complains_of_nothing_and_fits_a_phone(browser, page):
    for size in (LAPTOP, PHONE):
        browser.open(page, size=size)
        browser.run("new Promise(done => setTimeout(done, 50))")
        asked = [event["params"]["request"]["url"] for event in browser.heard("Network.requestWillBeSent")]
        assert page.as_uri() in asked
        assert [url for url in asked if not url.startswith("data:image/png")] == [page.as_uri()]
        complaints = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        assert browser.heard(*complaints, "Page.javascriptDialogOpening") == []
    browser.run("document.querySelectorAll('section details').forEach(each => each.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= PHONE[0]
    edges = "[...document.querySelectorAll('section img')].map(i => i.getBoundingClientRect().right)"
    assert max(browser.run(edges)) <= PHONE[0]
    tiles = "[...document.querySelectorAll('.tiles *')].map(i => i.getBoundingClientRect().right)"
    assert max(browser.run(tiles)) <= PHONE[0]
    assert browser.run("document.querySelectorAll('.wide')[2].scrollWidth") > PHONE[0]
    links = browser.run("[...document.querySelectorAll('nav a')].map(a => [a.textContent, a.hash])")
    assert len(links) == 5
    assert links == browser.run("[...document.querySelectorAll('h2')].map(h => [h.textContent, '#' + h.id])")
    image = "'<img src=\"https://example.invalid/a.png\">'"
    browser.run(f"document.body.insertAdjacentHTML('beforeend', {image})")
    script = "const own = document.createElement('script'); own.textContent = 'window.ran = 1'; "
    browser.run(script + "document.body.append(own)")  # what the policy forbids
    browser.run("new Promise(done => setTimeout(done, 50))")
    said = [event["params"]["entry"]["text"] for event in browser.heard("Log.entryAdded")]
    assert browser.run("window.ran") is None
    assert sum("Content Security Policy" in text for text in said) >= 2


@pytest.mark.parametrize(
    ("place", "ascending", "unknown"),
    [
        (0, ["das (order 2)", "das (order 10)", "Das + migu", "ewc", "ncl"], []),
        (2, ["−0.5 ± 0.1", "9.75", "10.2 [9.0, 11.5]"], ["–", "nan"]),
        (4, ["9.1e+04", "1.2e+05", "2.0e+05", "inf"], ["–"]),
    ],
)
def test_tables_sort_by_words_and_by_numbers(opened, place, ascending, unknown):
    shown = []
    for _ in range(3):
        opened.run(f"{head(place)}.querySelector('button').click()")
        shown.append((opened.run(f"{head(place)}.ariaSort"), column(opened, place)))
    plain = ("none", [row[place] for row in ROWS])
    assert shown == [("ascending", ascending + unknown), ("descending", ascending[::-1] + unknown), plain]


def test_one_search_and_boxes_to_tick_choose_rows_in_all_tables_that_are_filtered(opened):
    for query, (left, others) in {"das -migu": ([3, 4], 2), "1,200": ([], 0), "": (range(5), 5)}.items():
        change = f"box.value = {json.dumps(query)}; box.dispatchEvent(new Event('input'))"
        opened.run(f"{{const box = document.querySelector('input[type=search]'); {change}}}")
        assert column(opened, 0) == [ROWS[place][0] for place in left], query
        assert len(column(opened, 0, table=1)) == others
        count = opened.run("document.querySelector('output').textContent")
        assert count.startswith(f"{len(left) + others} of 10")
    for text in ("das", "ewc", "large"):
        found = f"[...document.querySelectorAll('.page label')].find(l => l.textContent.trim() == '{text}')"
        opened.run(f"{found}.querySelector('input').click()")
    assert column(opened, 0) == column(opened, 0, table=1) == ["ewc", "das (order 10)"]
    opened.run("document.querySelector('.page button').click()")
    assert column(opened, 0) == [row[0] for row in ROWS]
