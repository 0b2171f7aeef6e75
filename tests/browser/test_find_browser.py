"""The tests find a browser on the machines that we promise to support, or say what to install."""

import find_browser
import pytest


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """A machine without a browser, whose owner may not install one."""
    monkeypatch.delenv("KVLIB_BROWSER", raising=False)
    monkeypatch.setattr(find_browser.shutil, "which", lambda name: None)
    monkeypatch.setattr(find_browser, "MAC_APPLICATIONS", ())
    return tmp_path


def test_a_browser_named_in_the_environment_comes_first(bare_machine, monkeypatch):
    monkeypatch.setattr(find_browser.shutil, "which", lambda name: name)
    monkeypatch.setenv("KVLIB_BROWSER", "/opt/browser")
    assert find_browser.find_browser("missing") == "/opt/browser"


def test_a_browser_named_in_the_environment_that_is_not_there_is_refused(bare_machine, monkeypatch):
    monkeypatch.setenv("KVLIB_BROWSER", "/nonexistent")
    with pytest.raises(RuntimeError, match="KVLIB_BROWSER was '/nonexistent'"):
        find_browser.find_browser(__file__)


@pytest.mark.parametrize("name", ["chromium", "google-chrome", "microsoft-edge"])
def test_an_installed_browser_comes_before_playwrights_own(bare_machine, monkeypatch, name):
    monkeypatch.setattr(find_browser.shutil, "which", lambda asked: f"/bin/{name}" if asked == name else None)
    assert find_browser.find_browser(__file__) == f"/bin/{name}"


def test_playwrights_own_browser_is_used_when_none_is_installed(bare_machine):
    assert find_browser.find_browser(__file__) == __file__


def test_root_on_debian_gets_chromium_from_apt(bare_machine, monkeypatch):
    tools, run = {"apt-get": "/usr/bin/apt-get"}, []

    def pretend_to_run(command, env):
        run.append(command)
        if "install" in command:
            tools["chromium"] = "/usr/bin/chromium"
        return find_browser.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(find_browser.shutil, "which", tools.get)
    monkeypatch.setattr(find_browser.os, "geteuid", lambda: 0)
    monkeypatch.setattr(find_browser.subprocess, "run", pretend_to_run)
    assert find_browser.find_browser("missing") == "/usr/bin/chromium"
    assert [command[2] for command in run] == ["update", "install"]


def test_no_browser_at_all_says_in_one_line_what_to_install(bare_machine):
    with pytest.raises(RuntimeError, match="install Chromium, Chrome or Edge") as failure:
        find_browser.find_browser("missing")
    assert "\n" not in str(failure.value)
