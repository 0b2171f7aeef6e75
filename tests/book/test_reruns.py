"""A page runs again when the library code that it uses changed, and only then."""

import pytest
from static_book.reruns import library_files


@pytest.fixture
def library(tmp_path):
    """A small package: two modules, one on top of the other, a lazy name, and a subpackage."""
    root = tmp_path / "lib"
    (root / "pictures").mkdir(parents=True)
    files = {
        "__init__.py": "def __getattr__(name): ...",
        "rule.py": "def mask(): ...",
        "kernel.py": "from lib import rule\ndef step(): ...",
        "costs.py": "def count(): ...",
        "pictures/__init__.py": "from lib.pictures.slots import Slots",
        "pictures/slots.py": "import lib.rule\nclass Slots: ...",
        "pictures/_near.py": "from .. import costs\nfrom .slots import Slots",
    }
    for name, text in files.items():
        (root / name).write_text(text, encoding="utf8")
    return root


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("import numpy", set()),
        ("import lib", {"__init__.py"}),
        ("import lib.costs as c", {"__init__.py", "costs.py"}),
        ("from lib import costs", {"__init__.py", "costs.py"}),
        ("from lib.kernel import step", {"__init__.py", "kernel.py", "rule.py"}),
        ("from lib import step", {"__init__.py", "kernel.py", "rule.py"}),
        ("import lib\nlib.step()", {"__init__.py", "kernel.py", "rule.py"}),
        ("import lib\nlib.kernel.step()", {"__init__.py", "kernel.py", "rule.py"}),
        ("from lib.pictures import Slots", {"__init__.py", "pictures/__init__.py", "pictures/slots.py", "rule.py"}),
        (
            "import lib.pictures._near",
            {"__init__.py", "pictures/__init__.py", "pictures/_near.py", "pictures/slots.py", "rule.py", "costs.py"},
        ),
        ("def late():\n    from lib import costs", {"__init__.py", "costs.py"}),
    ],
)
def test_the_files_that_code_imports_are_found_through_one_another(library, code, used):
    found = {path.relative_to(library).as_posix() for path in library_files(code, library)}
    assert found == used
