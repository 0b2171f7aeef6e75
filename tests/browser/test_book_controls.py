"""Every control of every widget of the built book changes the picture or what is said about it."""

import pytest
from bookpages import PAGES

CONTROLS = "button, select, input, textarea"

# All that a reader sees or hears of a widget, except the control that is being used.
PICTURE = """
(widget, used) => [...widget.querySelectorAll(".kv-live *")].filter((el) => el !== used && !used.contains(el))
  .map((el) => [el.tagName, el.getAttribute("class"), el.getAttribute("style"), el.getAttribute("aria-label"),
    el.getAttribute("aria-selected"), el.value, el.disabled, el.children.length ? "" : el.textContent,
    el.getAttribute("d"), el.getAttribute("fill")].join("|")).join("\\n")
"""


@pytest.fixture
def page_of(browser, built_book):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()

    def open_page(name):
        page.goto(f"{built_book.as_uri()}/{name}.html")
        page.wait_for_load_state("load")
        return page

    yield open_page
    context.close()


def use(control):
    """Use a control as a reader would, towards whatever it is not set to now."""
    kind = control.evaluate("el => el.tagName === 'INPUT' ? el.type : el.tagName.toLowerCase()")
    if kind == "select":
        others = control.evaluate("el => [...el.options].filter((o) => !o.selected && !o.disabled).map((o) => o.value)")
        assert others, "a list with nothing to choose"
        control.select_option(others[0])
    elif kind == "range":
        at_end = control.evaluate("el => Number(el.value) >= Number(el.max)")
        control.press("ArrowLeft" if at_end else "ArrowRight")
    elif kind == "number":
        control.focus()
        control.press("ArrowUp")
    elif kind in ("checkbox", "button", "submit"):
        control.click()
    elif kind == "radio":
        control.check()
    else:
        raise AssertionError(f"a control that this test does not know how to use: {kind}")


def forget_the_last_remark(widget):
    """Select a cell, as a reader does next: what was said about the control before goes away."""
    cell = widget.locator("[role=gridcell][tabindex='0']").first
    if cell.count():
        cell.evaluate("cell => cell.blur()")
        cell.focus()


def unchoose(control):
    """Choose another one of a radio button's group, so that choosing this one is a change."""
    if control.evaluate("el => el.type === 'radio' && el.checked"):
        control.evaluate(
            "el => [...el.closest('kv-widget').querySelectorAll('input[type=radio]')]"
            ".find((other) => other.name === el.name && other !== el)?.click()"
        )


def name_of(control):
    return control.evaluate("el => `${el.tagName} ${el.getAttribute('aria-label') || el.textContent || el.name}`")


@pytest.mark.parametrize("name", PAGES)
def test_every_control_of_every_widget_does_something(page_of, name):
    page, dead = page_of(name), []
    for place, widget in enumerate(page.locator("kv-widget").all()):
        used = 0
        for number in range(widget.locator(".kv-live").locator(CONTROLS).count()):
            control = widget.locator(".kv-live").locator(CONTROLS).nth(number)
            if control.is_disabled():
                continue
            forget_the_last_remark(widget)
            unchoose(control)
            handle = control.element_handle()
            before = widget.evaluate(PICTURE, handle)
            label = name_of(control)
            use(control)
            used += 1
            if widget.evaluate(PICTURE, handle) == before:
                dead.append(f"widget {place}: {label}")
        assert used or widget.locator("[role=grid]").count(), f"widget {place} has nothing to use"
    assert dead == []


@pytest.mark.parametrize("name", PAGES)
def test_every_grid_is_one_tab_stop_that_arrow_keys_walk(page_of, name):
    page = page_of(name)
    for grid in page.locator("kv-widget [role=grid]").all():
        stops = grid.locator("[tabindex='0']")
        assert stops.count() == 1
        stops.first.focus()
        says = grid.locator("xpath=ancestor::kv-widget").locator("[role=status]")
        heard = {says.inner_text()}
        for key in ("Home", "ArrowRight", "ArrowDown", "End", "ArrowUp"):
            page.keyboard.press(key)
            heard.add(says.inner_text())
        assert len(heard) > 1
        assert page.evaluate("document.activeElement.getAttribute('role')") == "gridcell"


def test_a_page_with_widgets_is_among_those_walked(page_of):
    assert sum(page_of(name).locator("kv-widget").count() for name in PAGES) >= 2
