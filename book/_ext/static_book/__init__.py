"""Make the built book a folder of its own: no kernel, no other site, no dead button.

Five things a stock Jupyter Book does not do:

- a page runs again when, and only when, its cells or the `kvlib` modules they use changed (`reruns`);
- widgets and maths load from the book's own folder, on the pages that hold some (`assets`);
- every page offers its executed notebook for download (`notebooks`);
- a page that leaves the book leaves the built folder, too (`leftovers`);
- the live-code extension, which needs another site, is taken out.
"""

import os

from static_book import assets, leftovers, notebooks, reruns


def setup(app):
    app.connect("config-inited", choose_static_widgets)
    app.connect("config-inited", drop_live_code)
    reruns.connect(app)
    assets.connect(app)
    notebooks.connect(app)
    leftovers.connect(app)
    # What `reruns` keeps in the environment is not merged from parallel readers.
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def choose_static_widgets(app, config):
    """Let the pages' kernels, which inherit the environment, draw widgets that need no kernel."""
    os.environ["KVLIB_STATIC"] = "1"


def drop_live_code(app, config):
    """Disconnect sphinx_thebe, which Jupyter Book always loads: its button needs a remote kernel."""
    for event, listeners in app.events.listeners.items():
        app.events.listeners[event] = [
            listener for listener in listeners if not _is_live_code(listener.handler.__module__)
        ]
    app.registry.css_files[:] = [
        (name, options) for name, options in app.registry.css_files if not _is_live_code(name)
    ]


def _is_live_code(name):
    return "thebe" in name
