"""Take the README's picture: the first widget of the built book's first page."""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "browser"))

from find_browser import launch  # noqa: E402  it stands with the tests, which use it most

PICTURE = ROOT / "book" / "_static" / "slot-explorer.png"


def main():
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(
            viewport={"width": 1280, "height": 900}, device_scale_factor=2, color_scheme="light"
        )
        page.goto((ROOT / "_build" / "html" / "book" / "start.html").as_uri())
        page.locator("kv-widget .kv-live").first.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
