"""What the README names is there, and its example runs."""

import re

from bookpages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf8")


def test_every_file_that_the_readme_links_to_is_there():
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_make_target_that_the_readme_names_exists():
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, re.MULTILINE))
    named = {in_block or in_text for in_block, in_text in named}
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.MULTILINE))
    assert {"serve", "test"} <= named
    assert named - defined == set()


def test_the_readme_example_runs():
    # The other one needs transformers: tests/peers/test_transformers.py runs it.
    example, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["weights"].sum() == 1
