"""Pictures of the cache that a reader can change, in a notebook and on a static page.

`SlotExplorer` shows which slot each query may attend and why; `AttentionHeatmap` shows
how much.  Make one as the last expression of a cell.  With a kernel and anywidget it is an
ipywidget whose traits are kept in step both ways.  With ``KVLIB_STATIC=1`` in the
environment, in Colab, or without anywidget, it is HTML.

A page that holds the HTML form loads `script` (deferred) and `stylesheet`, once each.
"""

from kvlib.widgets._bundle import script, stylesheet
from kvlib.widgets.heatmap import AttentionHeatmap
from kvlib.widgets.slots import SlotExplorer

__all__ = ["AttentionHeatmap", "SlotExplorer", "script", "stylesheet"]
