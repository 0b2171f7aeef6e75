"""What kvlib is compared with is what the requirements pin, so that a difference names its cause."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PINS = {
    name: pinned
    for file in ("requirements.txt", "requirements-peers.txt")
    for name, pinned in re.findall(r"^(\S+)==(\S+)$", (ROOT / file).read_text(encoding="utf8"), re.MULTILINE)
}


@pytest.mark.parametrize("name", ["torch", "numpy", "onnx", "onnxruntime", "jax", "jaxlib", "transformers"])
def test_a_peer_is_installed_in_the_version_that_is_pinned(name):
    assert version(name).partition("+")[0] == PINS[name]
