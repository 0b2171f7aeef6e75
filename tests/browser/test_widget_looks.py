"""How every widget looks and fails: themes, phones, print, no JavaScript, broken JavaScript."""

import numpy as np
import pytest
from playwright.sync_api import expect
from widget_pages import widget_page

from kvlib.widgets import AttentionHeatmap, SlotExplorer, script

# Contrast of each text with what lies behind it, both as the browser resolves them.
CONTRASTS = """(root) => {
  const brush = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
    .getContext("2d", { willReadFrequently: true });
  // Reading a pixel back is slow, and a grid has few colours.
  const known = {};
  const pixel = (colour, under = [255, 255, 255]) => known[[colour, under]] ??= mix(colour, under);
  const mix = (colour, under) => {
    brush.fillStyle = `rgb(${under})`;
    brush.fillRect(0, 0, 1, 1);
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    return [...brush.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const grounds = (el) => {
    const under = el.parentElement ? grounds(el.parentElement) : [[255, 255, 255]];
    const style = getComputedStyle(el);
    const stripes = style.backgroundImage.match(/(rgb|oklch|color)a?\\([^)]*\\)/g) ?? [];
    return under.flatMap((below) => {
      const flat = pixel(style.backgroundColor, below);
      return [flat, ...stripes.map((stripe) => pixel(stripe, flat))];
    });
  };
  const texts = [...root.querySelectorAll("*")].filter((el) => el.getClientRects().length && el.type !== "radio"
    && (el.value || [...el.childNodes].some((node) => node.nodeType === 3 && node.data.trim())));
  return texts.map((el) => {
    const ink = luminance(pixel(getComputedStyle(el).color));
    const ratios = grounds(el).map(luminance).map((g) => (Math.max(g, ink) + 0.05) / (Math.min(g, ink) + 0.05));
    return [`${el.className || el.tagName}: ${el.value || el.textContent}`, Math.min(...ratios)];
  });
}"""


def all_weights():
    """Return a heatmap in which every weight from 0 to 1 stands, in steps of 1/100."""
    weights = np.linspace(0, 1, 101)
    scores = np.full((101, 102), -1e4)
    with np.errstate(divide="ignore"):
        scores[:, 0], scores[:, 1] = (np.maximum(np.log(w), -1e4) for w in (weights, 1 - weights))
    return AttentionHeatmap(scores, [1], [101])


def tokens(*lengths):
    return [[f"token {slot}" for slot in range(length)] for length in lengths]


def widgets():
    scores = np.random.default_rng(0).normal(size=(3, 2, 4, 3, 16))
    return [
        SlotExplorer([3, 5], [3, 1], n_queries=3, capacity=8, selected=(0, 1, 5), title="Two rows"),
        SlotExplorer([30, 5], [3, 1], n_queries=3, capacity=40),
        AttentionHeatmap(
            scores, [13, 2], [3, 1], n_kv_heads=2, tokens=tokens(16, 3), title="Three layers"
        ),
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_enough_contrast(browser, theme):
    with widget_page(browser, *widgets(), all_weights(), theme=theme) as page:
        contrasts = page.evaluate_handle("document.body").evaluate(CONTRASTS)
        assert len(contrasts) > 1000
        assert [pair for pair in contrasts if pair[1] < 4.5] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_fallback_has_enough_contrast(browser, theme):
    with widget_page(browser, *widgets(), theme=theme, code="") as page:
        contrasts = page.evaluate_handle("document.body").evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert [pair for pair in contrasts if pair[1] < 4.5] == []


def panel(page):
    return page.locator(".kv-live .kv").first.evaluate("(el) => getComputedStyle(el).backgroundColor")


def test_the_theme_is_followed_live(browser):
    with widget_page(browser, *widgets()) as page:
        light = panel(page)
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        dark = panel(page)
        assert light != dark
        page.evaluate("document.documentElement.dataset.theme = 'light'")
        assert panel(page) == light


@pytest.mark.parametrize(
    "dark, light",
    [
        ("body.dataset.jpThemeLight = 'false'", "body.dataset.jpThemeLight = 'true'"),
        ("body.className = 'vscode-dark'", "body.className = 'vscode-light'"),
        (
            "documentElement.setAttribute('theme', 'dark')",
            "documentElement.setAttribute('theme', 'light')",
        ),
    ],
    ids=["JupyterLab", "VS Code", "Colab"],
)
def test_the_theme_of_a_notebook_is_followed_whatever_the_system_prefers(browser, dark, light):
    grounds = []
    for scheme, theme in [("light", dark), ("dark", light)]:
        with widget_page(browser, *widgets(), theme="", color_scheme=scheme) as page:
            before = panel(page)
            page.evaluate(f"document.{theme}")
            grounds.append((before, panel(page)))
    assert grounds[0] == grounds[1][::-1] and grounds[0][0] != grounds[0][1]


def test_without_a_theme_the_system_decides(browser):
    grounds = []
    for scheme in ("light", "dark"):
        with widget_page(browser, *widgets(), theme="", color_scheme=scheme) as page:
            grounds.append(panel(page))
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize("width", [320, 360, 1280])
@pytest.mark.parametrize("code", [None, ""], ids=["drawn", "fallback"])
def test_wide_grids_scroll_inside_their_own_box(browser, width, code):
    with widget_page(browser, *widgets(), code=code, viewport={"width": width, "height": 700}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.locator(".kv-scroll:visible").evaluate_all(
            "(els) => els.map((el) => el.scrollWidth > el.clientWidth)"
        )
        assert any(boxes)


def test_what_one_touches_is_large_enough(browser):
    phone = {"viewport": {"width": 320, "height": 700}, "has_touch": True, "is_mobile": True}
    with widget_page(browser, *widgets(), **phone) as page:
        sizes = page.locator(".kv-live button, .kv-live label, .kv-grid [data-row]").evaluate_all(
            "(els) => els.map((el) => el.getBoundingClientRect()).map((box) => Math.min(box.width, box.height))"
        )
        assert min(sizes) >= 44


@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_moves_while_cells_are_visited_and_numbers_are_refused(browser, width):
    with widget_page(browser, *widgets(), viewport={"width": width, "height": 700}) as page:
        tops = """() => [...document.querySelectorAll("kv-widget .kv-cell, kv-widget button, .kv-say")]
            .filter((el) => el.getClientRects().length)
            .map((el) => el.getBoundingClientRect()).map((box) => [box.left, box.top + scrollY, box.width, box.height])"""
        page.evaluate("new Promise(requestAnimationFrame)")
        before = page.evaluate(tops)
        for grid in page.locator(".kv-grid").all():
            for cell in grid.locator("[data-row]").all()[::7]:
                cell.dispatch_event("pointerover")
                assert page.evaluate(tops) == before
        for number in page.get_by_role("spinbutton").all():
            for wanted in ("-5", "9999"):
                shown = number.input_value()
                number.fill(wanted)
                number.press("Enter")
                number.fill(shown)
                number.press("Enter")
                assert page.locator(".kv-say:visible").evaluate_all(
                    "(els) => els.every((el) => el.scrollHeight <= el.clientHeight)"
                )


@pytest.mark.parametrize("width", [320, 360])
def test_on_a_phone_the_picture_and_its_sentence_come_before_what_changes_them(browser, width):
    phone = {"viewport": {"width": width, "height": 740}, "has_touch": True, "is_mobile": True}
    with widget_page(browser, widgets()[0], **phone) as page:
        parts = [
            ".kv-title",
            ".kv-grid",
            "[aria-label='Row 0, length before the call']",
            ".kv-say",
            "[aria-label='Capacity, slots per row']",
            ".kv-key",
        ]
        tops = [page.locator(f".kv-live {part}").first.bounding_box()["y"] for part in parts]
        assert tops == sorted(tops)
        pairs = [("Row 0, length", "Row 0, slots"), ("Capacity", "Offered per call")]
        for names in pairs:
            one, other = (page.get_by_role("spinbutton", name=name).bounding_box() for name in names)
            assert one["y"] == other["y"]


def test_fifteen_tokens_fit_a_page_column_of_the_book(browser):
    heatmap = AttentionHeatmap(np.zeros((15, 15)), [0], [15], tokens=tokens(15))
    with widget_page(browser, f'<div style="width: 688px">{heatmap.html()}</div>') as page:
        box = page.locator(".kv-live .kv-scroll")
        assert box.evaluate("(box) => box.scrollWidth <= box.clientWidth")


def test_forced_colours_keep_the_weights_and_the_chosen_head_apart(browser):
    with widget_page(browser, widgets()[2], forced_colors="active") as page:
        ground = "(els) => new Set(els.map((el) => getComputedStyle(el).backgroundColor)).size"
        assert page.locator(".kv-live .kv-scale .kv-cell").evaluate_all(ground) == 5
        assert page.locator(".kv-live .kv-heads label").evaluate_all(ground) == 2


def test_reduced_motion_stops_transitions(browser):
    durations = []
    for wish in ("no-preference", "reduce"):
        with widget_page(browser, *widgets(), reduced_motion=wish) as page:
            cell = page.locator(".kv-live .kv-cell").first
            durations.append(cell.evaluate("(el) => getComputedStyle(el).transitionDuration"))
    assert durations[0] != "0s" and durations[1] == "0s"


def test_without_javascript_a_captioned_picture_and_its_sentence_remain(browser):
    with widget_page(browser, *widgets(), java_script_enabled=False) as page:
        first, _, last = page.locator("kv-widget").all()
        expect(first.locator("figcaption")).to_have_text("Two rows (Slot explorer)")
        expect(first.locator("table caption").first).to_have_text("Row 0: length 3, appends 3 of 3")
        expect(
            first.get_by_text("Slot 5 holds a token appended after query 1 in this call")
        ).to_be_visible()
        expect(last.locator("figcaption")).to_have_text("Three layers (Attention heatmap)")
        expect(last.locator("td.kv-weight").first).to_be_visible()
        assert page.locator("script:visible").count() == 0


def test_the_fallback_says_what_the_widget_says_at_first(browser):
    with widget_page(browser, *widgets()) as page:
        for widget in page.locator("kv-widget").all():
            assert (
                widget.locator(".kv-fallback .kv-say").text_content()
                == widget.get_by_role("status").text_content()
            )


def test_once_drawn_the_fallback_hides_and_print_shows_it_again(browser):
    with widget_page(browser, *widgets()) as page:
        assert page.locator(".kv-fallback:visible").count() == 0
        assert page.locator(".kv-live:visible").count() == 3
        page.emulate_media(media="print")
        assert page.locator(".kv-fallback:visible").count() == 3
        assert page.locator(".kv-live:visible").count() == 0


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("const { fields, update } = WIDGETS[kind](", "const { fields, update } = undefinedName("),
        ("const cells = range(rows)", "const cells = rangeOf(rows)"),
    ],
)
def test_a_widget_that_breaks_says_so_under_its_name_and_leaves_the_fallback(browser, right, wrong):
    assert script().count(right) == 1
    with widget_page(browser, *widgets(), code=script().replace(right, wrong)) as page:
        first, _, last = page.locator("kv-widget").all()
        expect(first.get_by_role("alert")).to_contain_text("Slot explorer could not be drawn: ")
        expect(last.get_by_role("alert")).to_contain_text("Attention heatmap could not be drawn: ")
        assert page.locator(".kv-fallback:visible").count() == 3


def test_a_damaged_state_is_reported_by_its_widget_alone(browser):
    damaged = SlotExplorer([0], [1], 1, 1).html().replace('{"lengths"', '{"lengths')
    with widget_page(
        browser, damaged, SlotExplorer([0], [1], 1, 1), '<kv-widget kind="pie"></kv-widget>'
    ) as page:
        first, second, third = page.locator("kv-widget").all()
        expect(first.get_by_role("alert")).to_contain_text("Slot explorer could not be drawn: ")
        expect(second.get_by_role("status")).to_contain_text("Row 0, query 0, slot 0")
        expect(third.get_by_role("alert")).to_contain_text('Widget "pie" could not be drawn: ')


def test_a_later_fault_is_reported_too(browser):
    code = script().replace(
        "paint(grid.cells[t][j], name",
        "if (old === 4) throw new Error('planted'); paint(grid.cells[t][j], name",
    )
    with widget_page(browser, SlotExplorer([3], [1], 1, 8), code=code) as page:
        page.get_by_role("button", name="Increase Row 0, length").click()
        expect(page.get_by_role("alert")).to_have_text("Slot explorer could not be drawn: planted")
        assert page.locator(".kv-fallback:visible").count() == 1


def test_the_script_may_be_loaded_twice(browser):
    with widget_page(browser, *widgets(), code=script() + script()) as page:
        assert page.locator(".kv-live").count() == 3


def test_a_notebook_exported_as_html_draws_each_widget_that_brings_its_own_script(browser):
    outputs = [f"{widget.html()}<script>{script()}</script>" for widget in widgets()]
    with widget_page(browser, *outputs, code="") as page:
        expect(page.locator(".kv-live [role=grid]")).to_have_count(5)
        assert page.get_by_role("alert").count() == 0


def test_a_widget_that_moves_in_the_page_is_not_drawn_again(browser):
    with widget_page(browser, *widgets()) as page:
        page.evaluate("document.body.append(document.querySelector('kv-widget'))")
        assert page.locator(".kv-live").count() == 3


def test_on_a_phone_the_selected_cell_is_in_view_and_the_page_stays_at_its_top(browser):
    far = [
        SlotExplorer([30], [3], n_queries=3, capacity=40, selected=(0, 2, 31)),
        AttentionHeatmap(np.zeros((2, 40)), [30], [2], selected=(1, 31)),
    ]
    with widget_page(browser, *far, viewport={"width": 320, "height": 300}) as page:
        page.evaluate("new Promise(requestAnimationFrame)")
        for cell in page.locator("[aria-selected]").all():
            box = cell.locator("xpath=ancestor::div[contains(@class, 'kv-scroll')]")
            inner, outer = cell.bounding_box(), box.bounding_box()
            assert (
                outer["x"] <= inner["x"] and inner["x"] + inner["width"] <= outer["x"] + outer["width"]
            )
        assert page.evaluate("scrollY") == 0


def test_a_query_keeps_its_label_whole_when_its_cells_scroll_under_it(browser):
    with widget_page(browser, *widgets(), viewport={"width": 320, "height": 700}) as page:
        for grid in page.locator(".kv-grid").all():
            label, cell = grid.get_by_role("rowheader").first, grid.locator("[data-row]").first
            grid.locator("xpath=..").evaluate("(box) => { box.scrollLeft = 1e6; }")
            over, under = label.bounding_box(), cell.bounding_box()
            assert over["y"] <= under["y"] and over["height"] >= under["height"]
            assert over["x"] > under["x"] + under["width"]


def test_a_reader_who_comes_back_finds_controls_that_agree_with_the_picture(browser):
    with widget_page(browser, *widgets()) as page:
        controls = page.locator(".kv-live input")
        values = "(els) => els.map((el) => (el.type === 'radio' ? el.checked : el.value))"
        fresh = controls.evaluate_all(values)
        page.get_by_role("button", name="Append").first.click()
        page.get_by_role("button", name="Increase Layer").click()
        page.get_by_role("radio", name="Head 3").check()
        assert controls.evaluate_all(values) != fresh
        page.goto("about:blank")
        page.go_back()
        page.wait_for_load_state("load")
        page.evaluate("new Promise(requestAnimationFrame)")
        assert controls.evaluate_all(values) == fresh


def test_a_page_gains_no_landmark_from_its_widgets(browser):
    with widget_page(browser, *widgets()) as page:
        assert page.get_by_role("form").count() + page.get_by_role("region").count() == 0
