"""scripts/install.py takes a CPU build of torch exactly where the default one would waste gigabytes."""

from pathlib import Path

import install
import pytest
from bookpages import ROOT

INDEX = "https://packages.example/cpu"


def attempts(system, nvidia):
    return install.torch_attempts("2.13.0", system, nvidia, INDEX)


def test_linux_without_nvidia_tries_two_places_for_a_cpu_build_before_the_default():
    own_sources, cpu_index, default = attempts("Linux", nvidia=False)
    assert own_sources[-1] == cpu_index[-1] == "torch==2.13.0+cpu"
    assert INDEX not in own_sources
    assert cpu_index[cpu_index.index("--index-url") + 1] == INDEX
    assert default == ["torch==2.13.0"]


def test_an_index_that_does_not_answer_is_given_up_soon():
    cpu_index = attempts("Linux", nvidia=False)[1]
    assert int(cpu_index[cpu_index.index("--timeout") + 1]) <= 15
    assert int(cpu_index[cpu_index.index("--retries") + 1]) <= 1


@pytest.mark.parametrize(("system", "nvidia"), [("Linux", True), ("Darwin", False)])
def test_nvidia_machines_and_macs_take_the_default_build(system, nvidia):
    assert attempts(system, nvidia) == [["torch==2.13.0"]]


def test_the_pin_of_torch_is_read_from_the_requirements():
    assert install.torch_pin("numpy==2.0\ntorch==9.8.7\n") == "9.8.7"
    assert install.torch_pin((ROOT / "requirements.txt").read_text(encoding="utf8"))


def test_a_cpu_build_counts_as_the_pinned_version(monkeypatch):
    monkeypatch.setattr(install, "version", lambda name: "2.13.0+cpu")
    assert install.is_installed("torch", "2.13.0")
    assert not install.is_installed("torch", "2.13.1")


def test_a_package_that_is_not_there_is_not_installed():
    assert not install.is_installed("no-such-package-of-that-name", "1.0")


def test_the_default_build_is_announced_when_no_cpu_build_is_found(monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(install, "torch_attempts", lambda *_: [["first"], ["second"], ["last"]])
    monkeypatch.setattr(install, "pip_install", lambda *words, quiet: tried.append(words) or words == ("last",))
    install.install_torch("2.13.0")
    assert tried == [("first",), ("second",), ("last",)]
    assert "several gigabytes" in capsys.readouterr().out


@pytest.mark.parametrize("group", ["tests", "peers"])
def test_a_group_is_installed_only_if_it_is_asked_for(group, monkeypatch):
    calls = []
    monkeypatch.setattr(install, "is_installed", lambda *_: True)
    monkeypatch.setattr(install, "pip_install", lambda *words: calls.append(words) or True)
    for arguments in ([], [f"--{group}"]):
        monkeypatch.setattr("sys.argv", ["install.py", *arguments])
        install.main()
    without, wanted = (
        {Path(word).name for word in call if "requirements" in Path(word).name}
        for call in calls
        if "--requirement" in call
    )
    assert without == {"requirements.txt"}
    assert wanted - without == {{"tests": "requirements-test.txt", "peers": "requirements-peers.txt"}[group]}


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-test.txt", "requirements-peers.txt"])
def test_every_requirement_is_pinned_exactly(name):
    lines = (ROOT / name).read_text(encoding="utf8").splitlines()
    asked = [line for line in lines if line and not line.startswith("#")]
    assert asked
    assert [line for line in asked if "==" not in line] == []
