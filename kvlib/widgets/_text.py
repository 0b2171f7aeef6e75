"""Names, labels, glyphs and sentences that the Python and the JavaScript of the widgets share."""

from kvlib import visibility

NAMES = {"slots": "Slot explorer", "heatmap": "Attention heatmap"}

#: What stands in a cell, by state, so that colour is never the only sign.
GLYPHS = {"past": "✓", "chunk": "+", "self": "●", "future": "→", "unused": "·", "idle": "–"}

#: What the legend calls a state.
LABELS = {
    "past": "past",
    "chunk": "earlier in this call",
    "self": "itself",
    "future": "future",
    "unused": "unused",
    "idle": "idle query",
}

#: How the white space of a token is shown: " the" and "the" are different tokens.
SPACES = {" ": "␣", "\n": "↵", "\t": "⇥"}

HEATMAP_CAPTION = "A row is a query, a column is a cache slot. The weights of a query sum to 1; an idle query has none."
NO_QUERY = ["No query.", "This call offers no slots, so nothing is appended and nothing attends."]


def explain(slot, query, length, count):
    """Return why a query may or may not attend a slot, and what it attends at all."""
    why = visibility.sentence(slot, query, length, count)
    if visibility.state(slot, query, length, count) == "idle":
        return why
    return f"{why} {visibility.query_sentence(query, length, count)}"
