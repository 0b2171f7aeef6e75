"""The widgets as anywidget draws them in a notebook, over a model that a kernel changes too."""

import base64

import numpy as np
import pytest
from playwright.sync_api import expect
from widget_pages import states_of, widget_page

from kvlib.widgets import AttentionHeatmap, SlotExplorer
from kvlib.widgets._bundle import module

# anywidget imports the module and calls its render with a model; `window.model` stands in for the kernel's side.
MOUNT = """async ([address, state]) => {
  const kv = (await import(address)).default;
  const listeners = {};
  window.saved = [];
  window.model = {
    get: (name) => state[name],
    set(name, value) {
      state[name] = value;
      [...(listeners[`change:${name}`] ?? [])].forEach((listener) => listener());
    },
    save_changes() { window.saved.push(structuredClone(state)); },
    on(event, listener) { (listeners[event] ??= new Set()).add(listener); },
    off(event, listener) { listeners[event].delete(listener); },
  };
  window.heard = () => Object.values(listeners).reduce((sum, set) => sum + set.size, 0);
  const el = document.body.appendChild(document.createElement("div"));
  window.leave = kv.render({ model: window.model, el });
}"""


def mount(page, widget):
    address = f"data:text/javascript;base64,{base64.b64encode(module().encode()).decode()}"
    page.evaluate(MOUNT, [address, {"kind": widget.kind, **states_of([widget])[0]}])


def explorer():
    return SlotExplorer([3, 5], [3, 1], n_queries=3, capacity=8, selected=(0, 1, 5))


def heatmap():
    return AttentionHeatmap(np.random.default_rng(0).normal(size=(2, 2, 4, 3, 6)), [1, 2], [3, 1])


def test_what_the_kernel_sets_is_drawn(browser):
    with widget_page(browser) as page:
        mount(page, explorer())
        page.evaluate(
            "model.set('lengths', [1, 2]); model.set('counts', [0, 3]); model.set('capacity', 5)"
        )
        expect(page.locator(".kv-holds").first).to_have_text("1 filled + 0 written of 5")
        assert page.locator(".kv-grid").first.locator("[data-row]").count() == 15
        page.evaluate("model.set('selected', [1, 2, 4])")
        expect(page.get_by_role("status")).to_contain_text("Row 1, query 2, slot 4: attended.")


def test_rows_that_the_kernel_adds_are_drawn(browser):
    with widget_page(browser) as page:
        mount(page, explorer())
        page.evaluate("model.set('lengths', [0, 1, 2]); model.set('counts', [3, 2, 1])")
        expect(page.get_by_role("grid")).to_have_count(3)


def test_the_heatmap_follows_the_kernel(browser):
    with widget_page(browser) as page:
        mount(page, heatmap())
        page.evaluate("model.set('layer', 1); model.set('row', 1); model.set('head', 3)")
        expect(page.get_by_role("status")).to_contain_text("Layer 1, row 1, head 3")
        assert page.get_by_role("radio", name="Head 3").is_checked()


@pytest.mark.parametrize(
    "widget, act, saved",
    [
        (explorer(), "Append", {"lengths": [6, 6], "counts": [2, 1]}),
        (explorer(), "Increase Capacity, slots per row", {"capacity": 9}),
        (heatmap(), "Increase Layer", {"layer": 1}),
    ],
)
def test_what_the_reader_does_is_saved_for_the_kernel_in_one_message(browser, widget, act, saved):
    with widget_page(browser) as page:
        mount(page, widget)
        page.get_by_role("button", name=act, exact=True).click()
        messages = page.evaluate("window.saved")
        assert len(messages) == 1 and messages[0].items() >= saved.items()


def test_the_focus_stays_in_a_grid_that_the_kernel_resizes(browser):
    with widget_page(browser) as page:
        mount(page, explorer())
        page.locator("[data-row='1'][data-column='5']").first.focus()
        page.evaluate("model.set('capacity', 12)")
        expect(page.locator(".kv-grid").first.locator("[data-row]")).to_have_count(36)
        expect(page.locator("[data-row='1'][data-column='5']").first).to_be_focused()
        page.evaluate("model.set('capacity', 9); model.set('n_queries', 3)")
        page.keyboard.press("End")
        page.evaluate("model.set('capacity', 8)")
        expect(page.locator("[data-row='1'][data-column='7']").first).to_be_focused()


def test_jupyterlab_leaves_the_keys_pressed_in_a_grid_to_the_widget(browser):
    """Lumino, its keyboard, looks for this mark on the focused element itself."""
    with widget_page(browser) as page:
        for widget in (explorer(), heatmap()):
            mount(page, widget)
        cells = page.locator("[role=gridcell][tabindex]")
        assert cells.count() == 2 * 3 * 8 + 3 * 6
        assert page.locator("[role=gridcell][tabindex]:not([data-lm-suppress-shortcuts])").count() == 0


def test_a_widget_that_is_closed_listens_no_more(browser):
    with widget_page(browser) as page:
        for widget in (explorer(), heatmap()):
            mount(page, widget)
            assert page.evaluate("window.heard()") > 0
            page.evaluate("window.leave()")
            assert page.evaluate("window.heard()") == 0


def test_a_value_from_the_kernel_that_cannot_be_drawn_is_reported(browser):
    with widget_page(browser) as page:
        mount(page, explorer())
        page.evaluate("model.set('lengths', null)")
        expect(page.get_by_role("alert")).to_contain_text("Slot explorer could not be drawn: ")
