"""Build the book into _build/html: run what changed, and let no warning or failing cell pass."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(root=ROOT):
    """Build the book in a folder and return the exit code, 0 for a book without fault.

    Sphinx warns about a page only when it reads it.  So after a failure it forgets what it
    has read, or the next build would pass over the fault; outputs that ran well stay cached.
    """
    program = Path(sys.executable).with_name("jupyter-book")
    strict = ["--warningiserror", "--nitpick", "--keep-going"]
    code = subprocess.run([program, "build", *strict, str(root)]).returncode
    if code:
        shutil.rmtree(root / "_build" / ".doctrees", ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(build())
