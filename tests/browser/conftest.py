"""The browser that the tests of this folder share."""

import pytest
from find_browser import launch
from playwright.sync_api import sync_playwright


@pytest.fixture(scope="session")
def browser():
    """A headless browser of Chromium's family."""
    with sync_playwright() as playwright:
        launched = launch(playwright)
        yield launched
        launched.close()
