"""What a reader can do with the slot explorer."""

import pytest
from playwright.sync_api import expect
from widget_pages import widget_page

from kvlib import visibility
from kvlib.widgets import SlotExplorer
from kvlib.widgets._text import GLYPHS


@pytest.fixture
def explorer():
    return SlotExplorer([3, 5], [3, 1], n_queries=3, capacity=8, selected=(0, 1, 5))


def spoken(page):
    return page.get_by_role("status")


def cell(page, row, query, slot):
    return page.get_by_role("grid").nth(row).locator(f"[data-row='{query}'][data-column='{slot}']")


def number(page, label):
    return page.get_by_role("spinbutton", name=label)


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def set_to(page, label, value):
    number(page, label).fill(str(value))
    number(page, label).press("Enter")


def drawn(page):
    return page.locator(".kv-grid [data-row]").all_text_contents()


def glyphs(lengths, counts, n_queries, capacity):
    states = visibility.states(lengths, counts, n_queries, capacity)
    return [GLYPHS[visibility.STATES[code]] for code in states.ravel()]


def test_the_selected_cell_is_explained_at_first(browser, explorer):
    with widget_page(browser, explorer) as page:
        expect(spoken(page)).to_have_text(
            "Row 0, query 1, slot 5: not attended. "
            "Slot 5 holds a token appended after query 1 in this call: it is the future. "
            "Query 1 attends slots 0 to 4."
        )
        assert drawn(page) == glyphs([3, 5], [3, 1], 3, 8)


def test_pointing_at_a_cell_explains_it_and_leaving_returns_to_the_selected_one(browser, explorer):
    with widget_page(browser, explorer) as page:
        cell(page, 1, 0, 2).hover()
        expect(spoken(page)).to_contain_text(
            "Row 1, query 0, slot 2: attended. Slot 2 was filled before this call"
        )
        page.mouse.move(1, 1)
        expect(spoken(page)).to_contain_text("Row 0, query 1, slot 5")


def test_clicking_a_cell_selects_it(browser, explorer):
    with widget_page(browser, explorer) as page:
        cell(page, 1, 2, 6).click()
        page.mouse.move(1, 1)
        expect(spoken(page)).to_contain_text("Row 1, query 2, slot 6: not attended. Query 2 is idle")
        assert page.locator("[aria-selected]").count() == 1


def test_touching_a_cell_selects_it(browser, explorer):
    with widget_page(browser, explorer, has_touch=True) as page:
        cell(page, 0, 2, 3).tap()
        expect(spoken(page)).to_contain_text(
            "Row 0, query 2, slot 3: attended. Slot 3 holds a token appended before query 2 in this call."
        )


def test_arrows_home_and_end_move_within_a_grid_that_is_one_tab_stop(browser, explorer):
    with widget_page(browser, explorer) as page:
        assert page.locator(".kv-grid").count() == 2
        for grid in page.locator(".kv-grid").all():
            assert grid.locator("[tabindex='0']").count() == 1
        number(page, "Row 0, slots it appends").focus()
        page.keyboard.press("Tab")
        expect(cell(page, 0, 1, 5)).to_be_focused()
        for key, place in [
            ("ArrowLeft", (1, 4)),
            ("ArrowUp", (0, 4)),
            ("ArrowUp", (0, 4)),
            ("ArrowRight", (0, 5)),
            ("ArrowDown", (1, 5)),
            ("Home", (1, 0)),
            ("End", (1, 7)),
            ("Control+Home", (0, 0)),
            ("ArrowLeft", (0, 0)),
            ("Control+End", (2, 7)),
        ]:
            page.keyboard.press(key)
            expect(cell(page, 0, *place)).to_be_focused()
            expect(spoken(page)).to_contain_text(f"Row 0, query {place[0]}, slot {place[1]}:")
        assert page.locator(".kv-grid").first.locator("[tabindex='0']").count() == 1
        page.keyboard.press("Tab")
        expect(number(page, "Row 1, length before the call")).to_be_focused()


def test_every_number_can_be_set_by_keyboard(browser, explorer):
    with widget_page(browser, explorer) as page:
        number(page, "Row 1, length before the call").focus()
        page.keyboard.press("ArrowDown")
        assert drawn(page) == glyphs([3, 4], [3, 1], 3, 8)
        set_to(page, "Capacity", 12)
        set_to(page, "Offered per call", 4)
        set_to(page, "Row 0, slots it appends", 4)
        set_to(page, "Row 1, slots it appends", 0)
        assert drawn(page) == glyphs([3, 4], [4, 0], 4, 12)


def test_every_number_can_be_set_by_its_buttons(browser, explorer):
    with widget_page(browser, explorer) as page:
        for name in [
            "Increase Capacity",
            "Decrease Row 0, length",
            "Decrease Row 0, slots",
            "Decrease Offered",
        ]:
            page.get_by_role("button", name=name).click()
        assert drawn(page) == glyphs([2, 5], [2, 1], 2, 9)
        assert number(page, "Capacity").input_value() == "9"


@pytest.mark.parametrize(
    "label, wanted, becomes, remark",
    [
        ("Capacity", 2, 6, "Capacity stops at 6: row 0 holds 6 after the call."),
        ("Capacity", 1000, 64, "Capacity stops at 64 in this picture."),
        ("Offered per call", -1, 0, "A call cannot offer fewer than 0 slots."),
        ("Offered per call", 99, 16, "This picture offers at most 16 slots per call."),
        ("Offered per call", 1, 1, "The call now offers 1: that is all for row 0."),
        (
            "Row 0, length before the call",
            9,
            5,
            "Row 0 stops at length 5: with 3 appended, its 8 slots are full.",
        ),
        ("Row 0, length before the call", -4, 0, "Row 0 cannot hold fewer than 0 slots."),
        ("Row 0, slots it appends", 4, 3, "Row 0 can append at most 3: the call offers no more."),
        ("Row 0, slots it appends", -1, 0, "Row 0 cannot append fewer than 0."),
    ],
)
def test_a_number_out_of_reach_stops_at_its_limit_and_says_why(
    browser, explorer, label, wanted, becomes, remark
):
    with widget_page(browser, explorer) as page:
        set_to(page, label, wanted)
        expect(spoken(page)).to_have_text(remark)
        assert number(page, label).input_value() == str(becomes)


def test_a_row_appends_no_more_than_it_has_room_for(browser):
    with widget_page(browser, SlotExplorer([7], [0], n_queries=3, capacity=8)) as page:
        set_to(page, "Row 0, slots it appends", 3)
        expect(spoken(page)).to_have_text("Row 0 can append at most 1: 7 of its 8 slots are filled.")
        assert drawn(page) == glyphs([7], [1], 3, 8)


def test_a_cache_keeps_at_least_one_slot(browser):
    with widget_page(browser, SlotExplorer([0], [0], n_queries=1, capacity=2)) as page:
        set_to(page, "Capacity", 0)
        expect(spoken(page)).to_have_text("Capacity stops at 1: a cache has at least one slot.")
        assert drawn(page) == glyphs([0], [0], 1, 1)


def test_a_remark_gives_way_to_the_next_cell(browser, explorer):
    with widget_page(browser, explorer) as page:
        set_to(page, "Capacity", 1)
        expect(spoken(page)).to_contain_text("Capacity stops")
        cell(page, 0, 0, 0).hover()
        expect(spoken(page)).to_contain_text("Row 0, query 0, slot 0: attended.")


@pytest.mark.parametrize("typed", ["", "1.5", "1e-3"])
def test_what_is_not_a_whole_number_changes_nothing(browser, explorer, typed):
    with widget_page(browser, explorer) as page:
        set_to(page, "Capacity", typed)
        assert number(page, "Capacity").input_value() == "8"
        assert drawn(page) == glyphs([3, 5], [3, 1], 3, 8)


def test_append_fills_the_cache_until_it_is_full_and_reset_goes_back(browser, explorer):
    with widget_page(browser, explorer) as page:
        append, reset = button(page, "Append"), button(page, "Reset")
        append.click()
        expect(spoken(page)).to_have_text(
            "Appended. The rows now hold 6, 6 slots; row 0 has room for 2 more."
        )
        assert drawn(page) == glyphs([6, 6], [2, 1], 3, 8)
        assert number(page, "Row 0, length before the call").input_value() == "6"
        assert page.locator(".kv-holds").all_text_contents() == [
            "6 filled + 2 written of 8",
            "6 filled + 1 written of 8",
        ]
        append.click()
        assert drawn(page) == glyphs([8, 7], [0, 1], 3, 8)
        append.click()
        assert drawn(page) == glyphs([8, 8], [0, 0], 3, 8)
        append.click()
        expect(spoken(page)).to_contain_text("No row appends anything.")
        assert drawn(page) == glyphs([8, 8], [0, 0], 3, 8)
        reset.click()
        assert drawn(page) == glyphs([3, 5], [3, 1], 3, 8)
        expect(spoken(page)).to_have_text("Back to the start.")


def test_the_strip_shows_what_was_filled_what_is_written_and_what_is_unused(browser, explorer):
    with widget_page(browser, explorer) as page:
        strip = page.get_by_role("grid").first.get_by_role("columnheader")
        labels = [head.get_attribute("aria-label") for head in strip.all()][1:]
        assert labels == [
            *(f"Slot {slot}, filled before the call" for slot in range(3)),
            *(f"Slot {slot}, written by this call" for slot in range(3, 6)),
            *(f"Slot {slot}, unused" for slot in range(6, 8)),
        ]


def test_a_call_that_offers_nothing_says_so(browser, explorer):
    with widget_page(browser, explorer) as page:
        set_to(page, "Offered per call", 0)
        cell(page, 0, 0, 0).wait_for(state="detached")
        button(page, "Append").click()
        expect(spoken(page)).to_contain_text("No row appends anything.")
    with widget_page(browser, SlotExplorer([1], [0], n_queries=0, capacity=2)) as page:
        expect(spoken(page)).to_contain_text("This call offers no slots")


def test_the_selected_cell_stays_inside_a_grid_that_shrinks(browser):
    explorer = SlotExplorer([1], [1], n_queries=3, capacity=9, selected=(0, 2, 8))
    with widget_page(browser, explorer) as page:
        set_to(page, "Capacity", 4)
        set_to(page, "Offered per call", 2)
        expect(spoken(page)).to_contain_text("Row 0, query 1, slot 3")


def test_two_explorers_on_a_page_do_not_move_each_other(browser, explorer):
    with widget_page(browser, explorer, explorer) as page:
        first, second = page.locator("kv-widget").all()
        button(first, "Append").click()
        first.locator("[data-row]").first.click()
        assert (
            first.locator("[data-row]").all_text_contents()
            != second.locator("[data-row]").all_text_contents()
        )
        expect(spoken(second)).to_contain_text("Row 0, query 1, slot 5")
        assert second.locator(".kv-grid [data-row]").all_text_contents() == glyphs([3, 5], [3, 1], 3, 8)
        assert page.locator(".kv-live [id]").count() == 0


def test_offering_fewer_slots_lowers_what_the_rows_append(browser, explorer):
    with widget_page(browser, explorer) as page:
        set_to(page, "Offered per call", 2)
        assert drawn(page) == glyphs([3, 5], [2, 1], 2, 8)
        assert number(page, "Row 0, slots it appends").input_value() == "2"
        button(page, "Reset").click()
        assert drawn(page) == glyphs([3, 5], [3, 1], 3, 8)
