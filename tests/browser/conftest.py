"""The browser that the tests of this folder share."""

import os

import pytest
from find_browser import find_browser
from playwright.sync_api import sync_playwright

# A browser that asks its maker nothing, so that every request seen is the book's.
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser():
    """A headless browser of Chromium's family."""
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = playwright.chromium.launch(
            executable_path=find_browser(playwright.chromium.executable_path), args=[*QUIET, *sandbox]
        )
        yield launched
        launched.close()
