"""Exit with 0 if the Python that runs this can host the book's virtual environment."""

import sys

import ensurepip  # noqa: F401  Debian ships it apart, and venv needs it
import venv  # noqa: F401

sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
