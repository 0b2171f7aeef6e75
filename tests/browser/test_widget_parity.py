"""The JavaScript of the widgets and kvlib agree, over thousands of generated states."""

import math

import numpy as np
import pytest
import torch
from widget_pages import FAKE_MODEL, states_of, widget_page

from kvlib import kv_cache_attention_step, visibility
from kvlib.widgets import AttentionHeatmap, SlotExplorer
from kvlib.widgets._bundle import expression
from kvlib.widgets._text import GLYPHS, explain

# Every cell of every state: what the rule says, and what the widget drew for it.
RULE = """([code, states]) => {
  const kv = eval(code), model = FAKE_MODEL;
  return states.map((state) => {
    const el = document.createElement("div");
    kv.render({ model: model({ kind: "slots", ...state }), el });
    const drawn = [...el.querySelectorAll("[data-row]")].map((cell) => cell.textContent);
    const spoken = el.querySelector("[role=status]")?.textContent ?? el.textContent;
    const cells = [];
    state.lengths.forEach((length, b) => {
      const count = state.counts[b];
      for (let t = 0; t < state.n_queries; t++) {
        cells.push(kv.visibility.querySentence(t, length, count));
        for (let j = 0; j < state.capacity; j++) {
          const cell = [j, t, length, count];
          cells.push([kv.visibility.mayAttend(...cell), kv.visibility.state(...cell), kv.visibility.sentence(...cell)]);
        }
      }
    });
    return { drawn, spoken, cells };
  });
}""".replace("FAKE_MODEL", FAKE_MODEL)

# The weight of every cell as drawn, null where the widget shows none, and the sum that stands beside.
WEIGHTS = """([code, states]) => {
  const kv = eval(code), model = FAKE_MODEL;
  return states.map((state) => {
    const el = document.createElement("div");
    kv.render({ model: model({ kind: "heatmap", ...state }), el });
    if (el.querySelector(".kv-error")) return el.textContent;
    return [...el.querySelectorAll("[data-row]")].map((cell) =>
      cell.classList.contains("kv-weight") ? Number(cell.style.getPropertyValue("--kv-weight")) : null);
  });
}""".replace("FAKE_MODEL", FAKE_MODEL)


def explorers(n, seed=0):
    """Yield n slot explorers: small and large, with idle, empty and full rows among them."""
    yield SlotExplorer([0], [0], n_queries=0, capacity=1)
    yield SlotExplorer([0], [1], n_queries=1, capacity=1)
    yield SlotExplorer([1], [0], n_queries=3, capacity=1)
    yield SlotExplorer([8, 0], [0, 8], n_queries=8, capacity=8)
    random = np.random.default_rng(seed)
    for _ in range(n - 4):
        rows, n_queries, capacity = random.integers(1, 4), random.integers(0, 6), random.integers(1, 10)
        counts = np.minimum(random.integers(0, n_queries + 1, rows), capacity)
        lengths = random.integers(0, capacity - counts + 1)
        selected = [random.integers(size) for size in (rows, max(n_queries, 1), capacity)]
        yield SlotExplorer(lengths, counts, n_queries, capacity, selected)


def expected_of(explorer):
    lengths, counts = explorer.lengths, explorer.counts
    n_queries, capacity = explorer.n_queries, explorer.capacity
    states = visibility.states(lengths, counts, n_queries, capacity)
    attended = visibility.mask(lengths, counts, n_queries, capacity)
    cells = []
    for b, (length, count) in enumerate(zip(lengths, counts)):
        for t in range(n_queries):
            cells.append(visibility.query_sentence(t, length, count))
            cells += [
                [
                    bool(attended[b, t, j]),
                    visibility.STATES[states[b, t, j]],
                    visibility.sentence(j, t, length, count),
                ]
                for j in range(capacity)
            ]
    row, query, slot = explorer.selected
    return {
        "drawn": [GLYPHS[visibility.STATES[code]] for code in states.ravel()],
        "reason": explain(slot, query, lengths[row], counts[row]) if n_queries else "nothing attends.",
        "cells": cells,
    }


def rule_differences(page, code, n):
    """Return the explorers on which the JavaScript and kvlib disagree."""
    sample = list(explorers(n))
    got = page.evaluate(RULE, [code, states_of(sample)])
    wanted = [expected_of(explorer) for explorer in sample]
    return [
        explorer
        for explorer, one, other in zip(sample, got, wanted, strict=True)
        if one["drawn"] != other["drawn"]
        or one["cells"] != other["cells"]
        or not one["spoken"].endswith(other["reason"])
    ]


def heatmaps(n, seed=1):
    """Yield n heatmaps of calls of the kernel, each with the weights that the kernel returned."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    for number in range(n):
        rows, heads, share = random.integers(1, 4), random.integers(1, 3), random.integers(1, 4)
        n_queries, capacity, size = random.integers(0, 5), random.integers(1, 9), random.integers(1, 4)
        counts = np.minimum(random.integers(0, n_queries + 1, rows), capacity)
        lengths = torch.from_numpy(random.integers(0, capacity - counts + 1))
        append_mask = torch.arange(n_queries) < torch.from_numpy(counts)[:, None]
        options = {"scale": float(random.uniform(0.1, 3))} if number % 2 else {}
        queries, results = [], []
        for _ in range(random.integers(1, 3)):  # layers
            # Scores from almost equal to thousands apart.
            queries.append(normal(rows, heads * share, n_queries, size) * 10.0 ** random.uniform(-3, 4))
            new = normal(2, rows, heads, n_queries, size)
            caches = normal(2, rows, heads, capacity, size)
            results.append(
                kv_cache_attention_step(queries[-1], *new, *caches, lengths, append_mask, options)
            )
        layer, row, head = (random.integers(n) for n in (len(queries), rows, heads * share))
        heatmap = AttentionHeatmap.from_layers(
            queries,
            [result["key_cache"] for result in results],
            lengths,
            append_mask,
            options,
            [result["attention"] for result in results],
            layer=layer,
            row=row,
            head=head,
        )
        yield heatmap, results[layer]["attention"][row, head].numpy()


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def weight_differences(page, code, n):
    """Return how far the drawn weights are from the kernel's, at worst; masked cells must show none."""
    sample = list(heatmaps(n))
    got = page.evaluate(WEIGHTS, [code, states_of(heatmap for heatmap, _ in sample)])
    worst = 0.0
    for (heatmap, weights), drawn in zip(sample, got, strict=True):
        if isinstance(drawn, str):  # what the widget said instead
            return math.inf
        row = slice(heatmap.row, heatmap.row + 1)
        data = heatmap.data
        seen = visibility.mask(data["lengths"][row], data["counts"][row], *data["shape"][3:])[0].ravel()
        assert [weight is not None for weight in drawn] == seen.tolist()
        shown = np.array([weight or 0.0 for weight in drawn])
        worst = max(worst, np.abs(shown - weights.ravel()).max(initial=0))
    return worst


def test_states_and_sentences_of_the_explorer_equal_those_of_kvlib(browser):
    with widget_page(browser) as page:
        assert rule_differences(page, expression(), 2000) == []


def test_weights_of_the_heatmap_equal_those_of_the_kernel(browser):
    with widget_page(browser) as page:
        assert weight_differences(page, expression(), 2000) < 1e-6


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("query < count && slot <= length + query", "query < count && slot < length + query"),
        ("query >= count) return", "query > count) return"),
        ("slot >= length + count) return", "slot > length + count) return"),
        ("slot < length) return", "slot <= length) return"),
        ("slot < length + query) return", "slot <= length + query) return"),
        ("{ slot, query, new_length: length + count }", "{ slot, query, new_length: length }"),
        ('last > 0 ? "many"', 'last > 1 ? "many"'),
        (
            "const name = visibility.state(j, t, old, appended)",
            "const name = visibility.state(t, j, old, appended)",
        ),
    ],
)
def test_a_wrong_rule_in_the_javascript_is_noticed(browser, right, wrong):
    assert expression().count(right) == 1
    with widget_page(browser) as page:
        assert rule_differences(page, expression().replace(right, wrong), 60)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("gaps.map(Math.exp)", "gaps.map((gap) => Math.exp(gap / 2))"),
        ("power / sum", "power / (sum + 1)"),
        ("layer * rowsBefore(lengths.length)", "layer * rowsBefore(row)"),
        ("head * whole(row)", "row * whole(row)"),
        ("heads * whole(b), 0)", "whole(b), 0)"),
        ("t * (lengths[b] + 1)", "t * lengths[b]"),
    ],
)
def test_a_wrong_weight_in_the_javascript_is_noticed(browser, right, wrong):
    assert expression().count(right) == 1
    with widget_page(browser) as page:
        assert not weight_differences(page, expression().replace(right, wrong), 60) < 1e-6
