"""Every page, in a real browser: quiet, whole and readable, served or opened by double click."""

import pytest
from bookpages import PAGES

WAYS = ["http", "file"]
THEMES = ["light", "dark"]
#: Pages and the book's own other pages, which the theme makes.
EVERY_PAGE = [*PAGES, "search"]

CONTRAST = """
() => {
  // A canvas turns every way to write a colour into red, green, blue and alpha.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return { rgb: [r, g, b], alpha: alpha / 255 };
  };
  const over = (top, bottom) => top.rgb.map((n, i) => n * top.alpha + bottom[i] * (1 - top.alpha));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((n) => n / 255).map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, two) => {
    const [low, high] = [light(one), light(two)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (element) => {
    const layers = [];
    for (let el = element; el; el = el.parentElement) {
      const layer = parse(getComputedStyle(el).backgroundColor);
      layers.push(layer);
      if (layer.alpha === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const faint = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    const style = getComputedStyle(element);
    // The marks of unused and idle cells are ornament: each cell's name says what it is.
    if (text === "·" || text === "–") continue;
    if (!text || element.closest("script, style, [aria-hidden=true], :disabled") || !element.checkVisibility()) continue;
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const color = element instanceof SVGElement && style.fill !== "none" ? style.fill : style.color;
    const below = ground(element), found = ratio(over(parse(color), below), below);
    const least = size >= 24 || (size >= 18.66 && bold) ? 3 : 4.5;
    if (found < least - 0.01) faint.push(`${found.toFixed(2)}: ${text.slice(0, 40)} (${element.className})`);
  }
  return faint;
}
"""

SIDEWAYS = """
() => {
  const wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= wide) return [];
  return [...document.querySelectorAll("main *")]
    .filter((el) => el.getBoundingClientRect().right > wide + 1)
    .slice(-5).map((el) => `${el.tagName} ${el.className}`).concat("the page scrolls");
}
"""

REPEATED_IDS = """
() => {
  const ids = [...document.querySelectorAll("[id]")].map((el) => el.id);
  return ids.filter((id, place) => ids.indexOf(id) !== place);
}
"""


@pytest.fixture
def open_page(browser, built_book, book_server):
    """A function that opens a page of the book and returns it with all that went wrong so far."""
    contexts = []

    def open_page(name, way="file", theme="light", width=1280, height=900, query="", **options):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, **options
        )
        contexts.append(context)
        page, troubles = context.new_page(), []
        base = book_server if way == "http" else built_book.as_uri()

        def watch_console(message):
            if message.type in ("error", "warning") or "invalid" in message.text.lower():
                troubles.append(f"console: {message.text}")

        def watch_request(request):
            if not request.url.startswith((base, "data:", "blob:")):
                troubles.append(f"foreign request: {request.url}")

        def watch_response(response):
            if response.status >= 400:
                troubles.append(f"{response.status}: {response.url}")

        page.on("console", watch_console)
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("requestfailed", lambda request: troubles.append(f"failed: {request.url} {request.failure}"))
        page.on("request", watch_request)
        page.on("response", watch_response)
        page.goto(f"{base}/{name}.html{query}")
        page.wait_for_load_state("networkidle")
        if page.locator(".math").count() and options.get("java_script_enabled", True):
            page.locator("mjx-container").first.wait_for()
        return page, troubles

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EVERY_PAGE)
def test_a_page_opens_without_an_error_and_asks_no_other_site(open_page, name, way, theme):
    page, troubles = open_page(name, way, theme)
    assert page.locator("h1:visible").count() == 1
    assert page.locator("html").get_attribute("data-theme") == theme
    assert troubles == []


@pytest.mark.parametrize("width", [320, 360, 390])
@pytest.mark.parametrize("name", EVERY_PAGE)
def test_a_page_never_scrolls_sideways_on_a_phone(open_page, name, width):
    page, _ = open_page(name, width=width, height=740)
    assert page.evaluate(SIDEWAYS) == []


@pytest.mark.parametrize("width, height", [(1280, 800), (360, 740)])
def test_the_first_page_shows_its_first_picture_in_the_first_screenful(open_page, width, height):
    touch = width < 400
    page, _ = open_page(PAGES[0], width=width, height=height, has_touch=touch, is_mobile=touch)
    selected = page.locator("kv-widget [aria-selected]").first.bounding_box()
    assert selected["y"] + selected["height"] <= height


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PAGES)
def test_all_text_stands_out_from_its_ground(open_page, name, theme):
    # A colour that is still fading would be measured half way.
    page, _ = open_page(name, theme=theme, reduced_motion="reduce")
    for folded in page.locator("details").all():
        folded.evaluate("details => { details.open = true }")
    assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("name", PAGES)
def test_no_two_elements_of_a_page_share_an_id(open_page, name):
    page, _ = open_page(name)
    assert page.evaluate(REPEATED_IDS) == []


@pytest.mark.parametrize("way", WAYS)
def test_search_finds_a_page_and_leads_there(open_page, way):
    page, troubles = open_page("search", way, query="?q=visibility")
    found = page.locator("ul.search li a").first
    found.wait_for()
    found.click()
    page.wait_for_load_state("networkidle")
    assert "/book/" in page.url
    assert troubles == []


@pytest.mark.parametrize("name", PAGES)
def test_the_theme_button_changes_a_page_at_once(open_page, name):
    page, troubles = open_page(name)
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {page.evaluate(ground)}
    for _ in range(3):
        page.locator(".theme-switch-button:visible").first.click()
        seen.add(page.evaluate(ground))
    assert len(seen) == 2
    assert troubles == []


@pytest.mark.parametrize("name", PAGES)
def test_no_button_of_a_page_is_dead(open_page, name):
    """Live code, full screen, repository: whatever needs more than the folder is not there."""
    page, _ = open_page(name)
    buttons = page.locator(".bd-header-article :is(button, a)").all()
    # Bootstrap moves a tooltip's words from the title to the label.
    words = "el => [el.title, el.ariaLabel, el.dataset.bsOriginalTitle, el.textContent].join(' ').toLowerCase()"
    said = [button.evaluate(words) for button in buttons]
    assert any("download" in name for name in said)
    needs_more = ("launch", "live code", "thebe", "colab", "binder", "repository", "edit", "issue")
    assert [name for name in said if any(need in name for need in needs_more)] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_printed_page_holds_a_still_of_each_widget(open_page, name):
    page, _ = open_page(name)
    page.emulate_media(media="print")
    for widget in page.locator("kv-widget").all():
        stills = widget.locator(".kv-fallback, .kv-live").all()
        shown = [still for still in stills if still.is_visible()]
        assert shown
        assert max(len(still.inner_text().strip()) for still in shown) > 40
        assert all(not button.is_visible() for button in widget.locator("button").all())
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_javascript_still_shows_what_its_widgets_say(open_page, name):
    page, _ = open_page(name, java_script_enabled=False)
    for widget in page.locator("kv-widget").all():
        assert widget.locator(".kv-fallback").is_visible()
        assert len(widget.locator(".kv-fallback").inner_text().strip()) > 40
