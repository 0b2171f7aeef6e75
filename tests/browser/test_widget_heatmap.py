"""What a reader can do with the attention heatmap."""

import numpy as np
import pytest
from playwright.sync_api import expect
from widget_pages import widget_page

from kvlib.widgets import AttentionHeatmap

TOKENS = [
    ["The", " <b>cat</b>", " sat", "\n", "junk"],
    ["&amp;", " a very long token that never ends", " x"],
]


@pytest.fixture
def heatmap():
    """Two layers, rows and KV heads, four heads: no two pictures are alike."""
    scores = np.random.default_rng(0).normal(size=(2, 2, 4, 3, 6))
    return AttentionHeatmap(scores, [1, 2], [3, 1], n_kv_heads=2, tokens=TOKENS, selected=(1, 1))


def spoken(page):
    return page.get_by_role("status")


def cell(page, query, slot):
    return page.locator(f".kv-grid [data-row='{query}'][data-column='{slot}']")


def numbers(page):
    """Return the drawn weights (Q, M), nan in masked cells."""
    return np.array(
        page.locator(".kv-grid .kv-line:has([data-row])").evaluate_all(
            """(lines) => lines.map((line) => [...line.querySelectorAll("[data-row]")].map((cell) =>
                cell.classList.contains("kv-weight") ? Number(cell.textContent) : NaN))"""
        )
    )


def assert_shows(page, heatmap, layer=0, row=0, head=0):
    length, count = heatmap.data["lengths"][row], heatmap.data["counts"][row]
    weights = heatmap.weights(layer, row, head)
    queries, slots = np.indices(weights.shape)
    weights[(queries >= count) | (slots > length + queries)] = np.nan
    np.testing.assert_allclose(numbers(page), weights, atol=0.0051)


def test_cells_hold_their_weights_and_every_query_sums_to_one(browser, heatmap):
    with widget_page(browser, heatmap) as page:
        assert_shows(page, heatmap)
        assert page.locator(".kv-line > .kv-sum").all_text_contents() == ["sum", "1.00", "1.00", "1.00"]
        expect(page.locator(".kv-live .kv-caption")).to_contain_text("The weights of a query sum to 1")


def test_idle_queries_have_no_weight(browser, heatmap):
    heatmap.row = 1
    with widget_page(browser, heatmap) as page:
        assert page.locator(".kv-line > .kv-sum").all_text_contents() == ["sum", "1.00", "0.00", "0.00"]
        cell(page, 2, 0).hover()
        expect(spoken(page)).to_contain_text(
            "query 2, key in slot 0 “&amp;”: masked, no weight. Query 2 is idle"
        )


def test_a_cell_gives_query_key_score_weight_and_reason(browser, heatmap):
    score = np.random.default_rng(0).normal(size=(2, 2, 4, 3, 6))[0, 0, 0, 1, 1]
    with widget_page(browser, heatmap) as page:
        expect(spoken(page)).to_have_text(
            "Layer 0, row 0, head 0 of KV head 0, query 1 “␣sat”, key in slot 1 “␣<b>cat</b>”: "
            f"weight {heatmap.weights()[1, 1]:.4f}, score {score:.3f}. "
            "Slot 1 holds a token appended before query 1 in this call. Query 1 attends slots 0 to 2."
        )


def test_a_masked_cell_gives_its_reason_and_no_weight(browser, heatmap):
    with widget_page(browser, heatmap) as page:
        cell(page, 0, 3).hover()
        expect(spoken(page)).to_contain_text(
            "masked, no weight. Slot 3 holds a token appended after query 0"
        )
        cell(page, 0, 5).focus()
        expect(spoken(page)).to_contain_text("masked, no weight. Slot 5 is unused")


def test_masked_cells_are_told_from_small_weights_by_their_text_and_ground(browser):
    scores = [[0.0, -60.0, 0.0, 0.0], [0.0, -60.0, -60.0, 0.0]]
    with widget_page(browser, AttentionHeatmap(scores, [1], [2])) as page:
        small, masked = cell(page, 0, 1), cell(page, 0, 2)
        assert [small.text_content(), masked.text_content(), cell(page, 0, 3).text_content()] == [
            ".00",
            "→",
            "·",
        ]
        ground = "(cell) => getComputedStyle(cell).background"
        assert small.evaluate(ground) != masked.evaluate(ground)
        small.hover()
        expect(spoken(page)).to_contain_text("weight below 0.0001, score -60.000")


def test_layer_row_and_head_can_be_chosen(browser, heatmap):
    with widget_page(browser, heatmap) as page:
        page.get_by_role("spinbutton", name="Layer").fill("1")
        page.keyboard.press("Enter")
        assert_shows(page, heatmap, layer=1)
        page.get_by_role("button", name="Increase Row").click()
        assert_shows(page, heatmap, layer=1, row=1)
        page.get_by_role("radio", name="Head 2").check()
        assert_shows(page, heatmap, layer=1, row=1, head=2)
        page.keyboard.press("ArrowRight")
        assert_shows(page, heatmap, layer=1, row=1, head=3)
        expect(spoken(page)).to_contain_text("Layer 1, row 1, head 3 of KV head 1, query 1")


@pytest.mark.parametrize(
    "label, remark", [("Layer", "The layers go from 0 to 1."), ("Row", "The rows go from 0 to 1.")]
)
def test_a_choice_out_of_reach_stops_and_says_why(browser, heatmap, label, remark):
    with widget_page(browser, heatmap) as page:
        page.get_by_role("spinbutton", name=label).fill("7")
        page.keyboard.press("Enter")
        expect(spoken(page)).to_have_text(remark)
        assert page.get_by_role("spinbutton", name=label).input_value() == "1"


def test_heads_that_share_a_kv_head_stand_together(browser, heatmap):
    with widget_page(browser, heatmap) as page:
        for kv_head, heads in enumerate([["0", "1"], ["2", "3"]]):
            group = page.get_by_role("group", name=f"Heads of KV head {kv_head}")
            assert [radio.get_attribute("value") for radio in group.get_by_role("radio").all()] == heads


def test_choices_of_one_are_not_offered(browser):
    with widget_page(browser, AttentionHeatmap([[0.0, 1.0]], [1], [1])) as page:
        assert page.locator(".kv-live").locator("input, button, select").count() == 0
        expect(spoken(page)).to_contain_text("Query 0, key in slot 0: weight 0.2689, score 0.000.")


def test_arrows_move_in_a_grid_that_is_one_tab_stop(browser, heatmap):
    with widget_page(browser, heatmap) as page:
        assert page.locator(".kv-grid [tabindex='0']").count() == 1
        page.get_by_role("radio", name="Head 0").focus()
        page.keyboard.press("Tab")
        for key, place in [
            ("ArrowRight", (1, 2)),
            ("ArrowDown", (2, 2)),
            ("End", (2, 5)),
            ("Control+Home", (0, 0)),
        ]:
            page.keyboard.press(key)
            expect(cell(page, *place)).to_be_focused()
            expect(spoken(page)).to_contain_text(f"query {place[0]}")


def test_touching_a_cell_selects_it(browser, heatmap):
    with widget_page(browser, heatmap, has_touch=True) as page:
        cell(page, 2, 3).tap()
        expect(spoken(page)).to_contain_text("query 2 “↵”, key in slot 3 “↵”: weight")


def test_two_heatmaps_on_a_page_do_not_move_each_other(browser, heatmap):
    with widget_page(browser, heatmap, heatmap) as page:
        first, second = page.locator("kv-widget").all()
        first.get_by_role("radio", name="Head 3").check()
        expect(spoken(first)).to_contain_text("head 3")
        expect(spoken(second)).to_contain_text("head 0")
        assert second.get_by_role("radio", name="Head 0").is_checked()
        assert page.locator(".kv-live [id]").count() == 0


def test_markup_in_a_token_is_text(browser, heatmap):
    with widget_page(browser, heatmap) as page:
        assert (
            page.locator(
                "kv-widget .kv-cell b, kv-widget .kv-slot b, kv-widget [role=status] span b"
            ).count()
            == 0
        )
        expect(page.locator(".kv-slot small").nth(1)).to_have_text("␣<b>cat</b>")


def test_an_unused_slot_carries_no_token(browser, heatmap):
    with widget_page(browser, heatmap) as page:
        assert page.locator(".kv-slot small").all_text_contents() == [
            "The",
            "␣<b>cat</b>",
            "␣sat",
            "↵",
            "",
            "",
        ]


def test_a_call_without_queries_says_so(browser):
    with widget_page(browser, AttentionHeatmap(np.zeros((0, 3)), [2], [0])) as page:
        expect(spoken(page)).to_contain_text("This call offers no slots")
