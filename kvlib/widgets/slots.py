"""The slot explorer: which slot every query of a batch may attend, and why."""

from __future__ import annotations

from kvlib import visibility
from kvlib.widgets._host import Widget, checks, spoken, synced
from kvlib.widgets._table import table
from kvlib.widgets._text import GLYPHS, LABELS, NO_QUERY, explain
from kvlib.widgets._validation import index, text

_NUMBERS = ("lengths", "counts", "n_queries", "capacity")


class SlotExplorer(Widget):
    """Rows of a batch against the slots of their caches, for a reader to change.

    The reader sets the capacity, what the call offers, and each row's length and count;
    gets, for any cell, the sentence of `kvlib.visibility` that says why that query may or
    may not attend that slot; and steps through appends.

    Parameters
    ----------
    lengths : sequence of int, shape (B,)
        Live slots of each row before the call.
    counts : sequence of int, shape (B,)
        How many of the offered slots each row appends.
    n_queries : int
        Q, the slots that the call offers to every row.
    capacity : int
        M, the slots of every row's buffer; at least 1.
    selected : tuple of int, (row, query, slot)
        The cell whose sentence is shown first.
    title : str
        Shown above the picture, and its name for screen readers.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type, or does not fit the others.

    Notes
    -----
    In a notebook all parameters are traits, kept in step with the browser both ways; a
    value that does not fit raises `traitlets.TraitError`.  To change several that only fit
    together, use ``with explorer.hold_trait_notifications():``.

    Examples
    --------
    >>> from kvlib.widgets import SlotExplorer
    >>> SlotExplorer(lengths=[3, 5], counts=[3, 1], n_queries=3, capacity=8)
    <Slot explorer: lengths [3, 5], counts [3, 1], n_queries 3, capacity 8>
    """

    _kind = "slots"
    _fields = (*_NUMBERS, "selected", "title")
    lengths = synced()
    counts = synced()
    n_queries = synced()
    capacity = synced()
    selected = synced()
    title = synced()

    def __init__(self, lengths, counts, n_queries, capacity, selected=(0, 0, 0), title=""):
        numbers = _batch(lengths, counts, n_queries, capacity)
        super().__init__(**numbers, selected=_cell(selected, numbers), title=text("title", title))

    @checks(*_NUMBERS, "selected")
    def _check(self, name, value):
        numbers = {field: getattr(self, field) for field in _NUMBERS}
        if name == "selected":
            return _cell(value, numbers)
        return _batch(**{**numbers, name: value})[name]

    def _summary(self):
        return ", ".join(f"{name} {getattr(self, name)}" for name in _NUMBERS)

    def _still(self):
        states = visibility.states(self.lengths, self.counts, self.n_queries, self.capacity)
        tables = []
        for row, (length, count) in enumerate(zip(self.lengths, self.counts)):
            names = [[visibility.STATES[code] for code in codes] for codes in states[row]]
            tables.append(
                table(
                    caption=f"Row {row}: length {length}, appends {count} of {self.n_queries}",
                    columns=[(str(slot), "") for slot in range(self.capacity)],
                    rows=[(f"query {query}", "") for query in range(self.n_queries)],
                    cells=[[(name, GLYPHS[name], "") for name in line] for line in names],
                )
            )
        legend = ", ".join(f"{GLYPHS[name]} {LABELS[name]}" for name in visibility.STATES)
        return "".join(tables) + f'<p class="kv-caption">{legend}</p>'

    def _spoken(self):
        if self.n_queries == 0:
            return spoken(*NO_QUERY)
        # Numbers may have shrunk since the cell was selected.
        sizes = (len(self.lengths), self.n_queries, self.capacity)
        row, query, slot = (min(at, size - 1) for at, size in zip(self.selected, sizes))
        length, count = self.lengths[row], self.counts[row]
        seen = visibility.may_attend(slot, query, length, count)
        return spoken(
            f"Row {row}, query {query}, slot {slot}: {'attended' if seen else 'not attended'}.",
            explain(slot, query, length, count),
        )


def _batch(lengths, counts, n_queries, capacity):
    """Return the four numbers of a batch as plain integers, or say what is wrong with them."""
    visibility.mask(lengths, counts, n_queries, capacity)
    numbers = {
        "lengths": [int(length) for length in lengths],
        "counts": [int(count) for count in counts],
        "n_queries": int(n_queries),
        "capacity": int(capacity),
    }
    if not numbers["lengths"]:
        raise ValueError("lengths was []; it must hold at least one row")
    if numbers["capacity"] < 1:
        raise ValueError("capacity was 0; it must be 1 or more")
    return numbers


def _cell(selected, numbers):
    """Return a cell (row, query, slot) as a list, checked against the batch."""
    try:
        row, query, slot = selected
    except (TypeError, ValueError):
        raise TypeError(f"selected was {selected!r}; it must be (row, query, slot)") from None
    return [
        index("selected row", row, len(numbers["lengths"])),
        index("selected query", query, max(numbers["n_queries"], 1)),
        index("selected slot", slot, numbers["capacity"]),
    ]
