"""Pages that hold widgets and nothing else, opened from a file as a reader's double click would."""

import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlib.widgets import script, stylesheet

PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Widgets</title>
<link rel="stylesheet" href="widgets.css"><script defer src="widgets.js"></script>
<style>body {{ margin: 0 auto; padding: 10px; max-width: 50rem; font: 16px/1.6 sans-serif }}
html[data-theme=dark] body {{ background: #121212; color: #ddd }}</style>
{body}"""

# The model of a notebook, as far as drawing needs one.
FAKE_MODEL = """(state) => ({
  get: (name) => state[name], set(name, value) { state[name] = value; }, save_changes() {}, on() {}, off() {},
})"""


@contextmanager
def widget_page(browser, *widgets, theme="light", code=None, complains=False, **context):
    """Open a page with these widgets, or pieces of HTML; it must not complain in the console.

    ``code`` takes the place of the widgets' script; ``context`` goes to the browser.
    """
    body = "\n".join(widget if isinstance(widget, str) else widget.html() for widget in widgets)
    complaints = []
    with TemporaryDirectory() as folder:
        Path(folder, "index.html").write_text(PAGE.format(theme=theme, body=body), encoding="utf-8")
        Path(folder, "widgets.js").write_text(script() if code is None else code, encoding="utf-8")
        Path(folder, "widgets.css").write_text(stylesheet(), encoding="utf-8")
        tab = browser.new_context(**context)
        page = tab.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text))
        page.on(
            "request", lambda request: request.url.startswith("file:") or complaints.append(request.url)
        )
        page.goto(Path(folder, "index.html").as_uri())
        yield page
        tab.close()
    assert complains or not complaints, complaints


def states_of(widgets):
    """Return the states of widgets, as the browser would read them from their JSON."""
    return [json.loads(json.dumps(widget.state())) for widget in widgets]
