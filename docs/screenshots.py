"""Takes pictures of every page of the built site in a headless browser, and lists their faults.

    pip install selenium
    mkdocs build --site-dir SITE
    python docs/screenshots.py SITE PICTURES

needs Chromium and its driver. Each page is opened at 1280 and 400 px, light and dark. These are faults: a page that is
wider than its window, a line of code that is cut off at 1280 px, a picture that does not load, a request to another
server, an error in the browser's console. The exit status is 1 if there is any, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator

from selenium import webdriver

WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
HEIGHT = 900
MAX_HEIGHT = 16_000  # of a picture; the browser draws no higher ones
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-component-update",
    "--disable-background-networking",
)
LOOK = """
const window_width = document.documentElement.clientWidth;
const may_scroll = ".md-typeset__scrollwrap, pre, math";
const outside = [...document.querySelectorAll("article *")].filter(
  (e) => e.getBoundingClientRect().right > window_width + 1 && !e.closest(may_scroll));
const cut = [...document.querySelectorAll("article pre > code")].filter(
  (e) => e.scrollWidth > e.clientWidth);
return {
  excess: document.documentElement.scrollWidth - window_width,
  outside: outside.length ? outside[0].outerHTML.slice(0, 80) : "",
  cut: cut.map((e) => e.textContent.split("\\n").reduce((a, b) => a.length < b.length ? b : a)),
  not_loaded: [...document.images].filter((i) => !(i.complete && i.naturalWidth)).map((i) => i.src),
  height: document.documentElement.scrollHeight,
};
"""


class _SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Writes nothing."""


@contextlib.contextmanager
def served(site: pathlib.Path) -> Iterator[str]:
    """The address of a local server of the folder."""
    handler = functools.partial(_SilentHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()


@contextlib.contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """Chromium with a new profile."""
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        logs = {"performance": "ALL", "browser": "ALL"}
        options.set_capability("goog:loggingPrefs", logs)
        installed = shutil.which("chromedriver")  # else selenium looks for one
        service = webdriver.ChromeService(executable_path=installed)
        driver = webdriver.Chrome(options=options, service=service)
        forget = {
            "source": "try { localStorage.clear() } catch {}"
        }  # the palette shown before
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", forget)
        try:
            yield driver
        finally:
            driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int) -> None:
    """Makes the window as large as that."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def show(driver: webdriver.Chrome, site: str, page: str, width: int, scheme: str) -> None:
    """Opens a page as it looks on a reader's first visit."""
    driver.get("about:blank")  # the page before would still follow the new colours
    resize(driver, width, HEIGHT)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("performance", "browser"):
        driver.get_log(log)  # drops the messages of the page before
    driver.get(site + page)


def requests(driver: webdriver.Chrome) -> list[str]:
    """The addresses that the page has requested."""
    log = driver.get_log("performance")
    events = [json.loads(entry["message"])["message"] for entry in log]
    sent = [e for e in events if e["method"] == "Network.requestWillBeSent"]
    return sorted({event["params"]["request"]["url"] for event in sent})


def faults(driver: webdriver.Chrome, site: str, width: int, scheme: str) -> list[str]:
    """What is wrong with the page that is shown."""
    seen = driver.execute_script(LOOK)
    found = []
    if seen["excess"] > 0 or seen["outside"]:
        found.append(f"{seen['excess']} px wider than the window: {seen['outside']}")
    if width == max(WIDTHS):
        found += [f"code cut off: {line.strip()}" for line in seen["cut"]]
    found += [f"picture not loaded: {address}" for address in seen["not_loaded"]]
    for address in requests(driver):
        if address.startswith(("http", "ws", "//")) and not address.startswith(site):
            found.append(f"request to another server: {address}")
    for entry in driver.get_log("browser"):
        if entry["level"] == "SEVERE":
            found.append(f"console: {entry['message']}")
    palette = {"light": "default", "dark": "slate"}[scheme]
    if driver.execute_script("return document.body.dataset.mdColorScheme") != palette:
        found.append(f"not in {scheme} colours")
    return found


def save_picture(driver: webdriver.Chrome, width: int, file: pathlib.Path) -> None:
    """Saves the page from its top to its end."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    resize(driver, width, min(height, MAX_HEIGHT))
    driver.save_screenshot(str(file))


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("pictures", type=pathlib.Path)
    parser.add_argument("--only", default="", help="pages with this in their path")
    arguments = parser.parse_args()
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    files = [file.relative_to(arguments.site) for file in arguments.site.rglob("*.html")]
    pages = sorted(file.as_posix() for file in files if file.name != "404.html")
    pages = [page for page in pages if arguments.only in page]
    if not pages:
        parser.error(f"{arguments.site} has no such page")

    wrong = []
    with served(arguments.site) as site, browser() as driver:
        for page in pages:
            name = page.removesuffix("index.html").strip("/").replace("/", "_") or "index"
            for width in WIDTHS:
                for scheme in SCHEMES:
                    show(driver, site, page, width, scheme)
                    found = faults(driver, site, width, scheme)
                    wrong += [f"{page}, {width} px, {scheme}: {what}" for what in found]
                    file = arguments.pictures / f"{name}_{width}_{scheme}.png"
                    save_picture(driver, width, file)
    print(f"{len(pages)} pages at {WIDTHS} px, {SCHEMES}")
    print(*(wrong or ["nothing is wrong"]), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
