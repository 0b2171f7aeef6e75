"""Names, labels and glyphs that the Python and the JavaScript of the widgets share."""

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

HEATMAP_CAPTION = "A row is a query, a column is a cache slot. The weights of a query sum to 1; an idle query has none."
