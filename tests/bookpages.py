"""Which pages the book has, from its table of contents."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def _listed(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("root", "file"):
                yield value
            else:
                yield from _listed(value)
    elif isinstance(node, list):
        for child in node:
            yield from _listed(child)


#: Every page, as _toc.yml names it: a path without its ending, from the root.
PAGES = list(_listed(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf8"))))
