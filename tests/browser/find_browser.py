"""Find a browser for the tests: one that is installed, else Playwright's own, else Debian's chromium."""

import os
import shutil
import subprocess
from pathlib import Path

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "microsoft-edge-stable",
)
MAC_APPLICATIONS = (
    "Google Chrome.app/Contents/MacOS/Google Chrome",
    "Chromium.app/Contents/MacOS/Chromium",
    "Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
)
NO_BROWSER = (
    "No browser found: install Chromium, Chrome or Edge, or run 'playwright install chromium', "
    "or name a browser's file in KVLIB_BROWSER."
)
# A browser that asks its maker nothing, so that every request seen is the book's.
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def launch(playwright):
    """Return a headless browser of Chromium's family."""
    # Chromium refuses its sandbox to root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(
        executable_path=find_browser(playwright.chromium.executable_path), args=[*QUIET, *sandbox]
    )


def installed_browser():
    """Return the file of an installed browser of Chromium's family, or None."""
    named = os.environ.get("KVLIB_BROWSER")
    if named:
        if not shutil.which(named):
            raise RuntimeError(f"KVLIB_BROWSER was {named!r}; it must be the file of a browser.")
        return named
    homes = [Path("/Applications"), Path.home() / "Applications"]
    applications = [home / name for home in homes for name in MAC_APPLICATIONS]
    found = [*map(shutil.which, NAMES), *(str(path) for path in applications if path.exists())]
    return next(filter(None, found), None)


def find_browser(own):
    """Return the file of a browser to test with.

    Parameters
    ----------
    own : str
        Where Playwright would keep its own Chromium, whether or not it is there.

    Raises
    ------
    RuntimeError
        If there is none and none can be installed; the message says what to do.
    """
    found = installed_browser() or (own if Path(own).exists() else None)
    if not found and install_on_debian():
        found = installed_browser()
    if not found:
        raise RuntimeError(NO_BROWSER)
    return found


def install_on_debian():
    """Install chromium where apt-get is and we may use it, and say whether that worked."""
    if not (shutil.which("apt-get") and os.geteuid() == 0):
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    steps = (["update"], ["install", "--yes", "--no-install-recommends", "chromium"])
    return all(
        subprocess.run(["apt-get", "--quiet", *step], env=environment).returncode == 0 for step in steps
    )
