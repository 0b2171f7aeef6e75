// What all widgets share: the rule, a few elements, and the two hosts.
// TEXT and WIDGETS come from the bundle, see _bundle.py.

// The rule of kvlib/visibility.py, mirrored. A browser test compares the two.
const visibility = {
  mayAttend(slot, query, length, count) {
    return query < count && slot <= length + query;
  },
  state(slot, query, length, count) {
    if (query >= count) return "idle";
    if (slot >= length + count) return "unused";
    if (slot < length) return "past";
    if (slot < length + query) return "chunk";
    return slot === length + query ? "self" : "future";
  },
  sentence(slot, query, length, count) {
    const template = TEXT.SENTENCES[visibility.state(slot, query, length, count)];
    return fill(template, { slot, query, new_length: length + count });
  },
  querySentence(query, length, count) {
    const last = length + query;
    const kind = query >= count ? "idle" : last > 0 ? "many" : "one";
    return fill(TEXT.QUERY_SENTENCES[kind], { query, last });
  },
};

// Why a query may or may not attend a slot, and what it attends at all.
function explain(slot, query, length, count) {
  const why = visibility.sentence(slot, query, length, count);
  return query < count ? `${why} ${visibility.querySentence(query, length, count)}` : why;
}

function fill(template, values) {
  return template.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

const clamp = (number, low, high) => Math.min(Math.max(number, low), high);
const range = (n) => Array.from({ length: n }, (_, i) => i);

// An element with attributes, listeners ("onclick") and children. Strings become text, never markup.
function h(tag, attributes, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else el.setAttribute(name, value);
  }
  el.append(...children);
  return el;
}

// A labelled whole number with - and + buttons. onwant gets the number asked for, within limits or not;
// the widget decides what it becomes and shows that. Without "off", a browser that goes back to the page
// would fill in what was typed before, and the number would not be the picture's.
function stepper(label, spoken, onwant) {
  const input = h("input", {
    type: "number", inputmode: "numeric", autocomplete: "off", "aria-label": spoken,
    onchange() {
      const wanted = input.valueAsNumber;
      input.value = shown;
      if (Number.isInteger(wanted)) onwant(wanted);
    },
  });
  const button = (sign, verb, by) => h("button", {
    type: "button", tabindex: -1, "aria-label": `${verb} ${spoken}`, onclick: () => onwant(shown + by),
  }, sign);
  let shown = 0;
  return {
    el: h("div", { class: "kv-stepper" }, h("span", { "aria-hidden": "true" }, label),
      h("span", { class: "kv-spin" }, button("−", "Decrease", -1), input, button("+", "Increase", 1))),
    show(number) {
      shown = number;
      input.value = number;
    },
  };
}

// The live sentence. `longest` reserves the height that the longest text needs, at any width.
function speaker(longest) {
  const bold = h("b", {}), rest = h("span", {});
  const put = (el, text) => { if (el.textContent !== text) el.textContent = text; };
  return {
    el: h("div", { class: "kv-say", "data-longest": longest },
      h("p", { role: "status", "aria-live": "polite" }, bold, " ", rest)),
    say(headline, text = "") {
      put(bold, headline);
      put(rest, text);
    },
  };
}

// A grid of cells with one tab stop. Arrows, Home and End move; focus, hence a click, selects;
// the pointer previews.
// corner, columnHeads and rowHeads label it; tails, if any, end the header row and each row.
function makeGrid({ label, corner, columnHeads, rowHeads, tails = [], onselect, onpreview }) {
  const rows = rowHeads.length, columns = columnHeads.length;
  const cells = range(rows).map((r) => range(columns).map((c) =>
    h("div", {
      role: "gridcell", class: "kv-cell", tabindex: -1, "data-row": r, "data-column": c,
      // JupyterLab takes keys pressed in an output for its own, and would delete the notebook's cell at "dd".
      "data-lm-suppress-shortcuts": "",
    })));
  const line = (...children) => h("div", { role: "row", class: "kv-line" }, ...children);
  const place = (event) => {
    const cell = event.target.closest("[data-row]");
    return cell && [Number(cell.dataset.row), Number(cell.dataset.column)];
  };
  const moves = {
    ArrowLeft: ([r, c]) => [r, c - 1], ArrowRight: ([r, c]) => [r, c + 1],
    ArrowUp: ([r, c]) => [r - 1, c], ArrowDown: ([r, c]) => [r + 1, c],
    Home: ([r], far) => [far ? 0 : r, 0], End: ([r], far) => [far ? rows - 1 : r, columns - 1],
  };
  const el = h("div", {
    role: "grid", class: "kv-grid", "aria-label": label, style: `--kv-columns:${columns}`,
    onkeydown(event) {
      const from = place(event), move = moves[event.key];
      if (!from || !move || event.altKey || event.metaKey) return;
      event.preventDefault();
      const [r, c] = move(from, event.ctrlKey);
      cells[clamp(r, 0, rows - 1)][clamp(c, 0, columns - 1)].focus();
    },
    onfocusin: (event) => { const at = place(event); if (at) onselect(...at); },
    onpointerover: (event) => { const at = place(event); if (at) onpreview(at); },
    onpointerleave: () => onpreview(null),
  }, ...[[corner, ...columnHeads], ...rowHeads.map((head, r) => [head, ...cells[r]])]
    .map((parts, i) => line(...parts, ...tails.slice(i, i + 1))));

  let stop = cells[0]?.[0];
  if (stop) stop.tabIndex = 0;
  return {
    el, cells,
    // Mark the selected cell, and the heads of the cell that the sentence speaks of; either may be null.
    mark(selected, spoken) {
      el.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
      if (selected) {
        stop.tabIndex = -1;
        stop = cells[selected[0]][selected[1]];
        stop.tabIndex = 0;
        stop.setAttribute("aria-selected", "true");
      }
      rowHeads.forEach((head, r) => head.classList.toggle("kv-on", r === spoken?.[0]));
      columnHeads.forEach((head, c) => head.classList.toggle("kv-on", c === spoken?.[1]));
    },
  };
}

function paint(cell, look, text, label) {
  cell.className = `kv-cell kv-${look}`;
  if (cell.textContent !== text) cell.textContent = text;
  cell.setAttribute("aria-label", label);
}

function legend(states) {
  return h("div", { class: "kv-key", role: "list" }, ...states.map((name) => h("span", { role: "listitem" },
    h("span", { class: `kv-cell kv-${name}`, "aria-hidden": "true" }, TEXT.GLYPHS[name]), TEXT.LABELS[name])));
}

function change(model, values) {
  for (const [name, value] of Object.entries(values)) model.set(name, value);
  model.save_changes();
}

// Scroll a wide grid, and nothing around it, until its selected cell is in view.
function reveal(root) {
  const cell = root.querySelector("[aria-selected]"), box = cell?.closest(".kv-scroll");
  if (!box) return;
  const beyond = cell.getBoundingClientRect().right - box.getBoundingClientRect().right;
  if (beyond > 0) box.scrollLeft += beyond + box.clientWidth / 8;
}

// Draw a widget into el and keep it drawn. Whatever goes wrong is said there, under the widget's name.
function draw(kind, open, el) {
  const fail = (error) => el.replaceChildren(h("p", { class: "kv kv-error", role: "alert" },
    `${TEXT.NAMES[kind] ?? `Widget "${kind}"`} could not be drawn: ${error.message}`));
  const guarded = (work) => { try { return work(); } catch (error) { fail(error); } };
  return guarded(() => {
    const model = open();
    const title = model.get("title");
    const root = h("div", { class: "kv", role: "group", "aria-label": title || TEXT.NAMES[kind] });
    if (title) root.append(h("p", { class: "kv-title" }, title));
    // Several fields often change together: draw once, when all have.
    let waiting = false;
    const redraw = () => {
      if (waiting) return;
      waiting = true;
      queueMicrotask(() => { waiting = false; guarded(update); });
    };
    const { fields, update } = WIDGETS[kind](model, root, redraw);
    el.append(root);
    update();
    requestAnimationFrame(() => reveal(root));
    const events = fields.map((name) => `change:${name}`);
    events.forEach((event) => model.on(event, redraw));
    return () => events.forEach((event) => model.off(event, redraw));
  });
}

// The notebook's host: anywidget calls this.
function render({ model, el }) {
  return draw(model.get("kind"), () => model, el);
}

// The page's host: a model over the JSON that stands in the element.
function pageModel(state) {
  const listeners = {};
  return {
    get: (name) => state[name],
    set(name, value) {
      state[name] = value;
      (listeners[`change:${name}`] ?? []).forEach((listener) => listener());
    },
    save_changes() {},
    on(event, listener) { (listeners[event] ??= []).push(listener); },
    off(event, listener) { listeners[event] = listeners[event].filter((other) => other !== listener); },
  };
}

function upgradePage() {
  if (customElements.get("kv-widget")) return;
  customElements.define("kv-widget", class extends HTMLElement {
    connectedCallback() {
      // While the page is being read, an element stands in it before its children do.
      if (document.readyState !== "loading") this.upgrade();
      else document.addEventListener("DOMContentLoaded", () => this.upgrade());
    }
    upgrade() {
      if (this.live) return;
      this.live = h("div", { class: "kv-live" });
      const open = () => pageModel(JSON.parse(this.querySelector("script").textContent));
      draw(this.getAttribute("kind"), open, this.live);
      this.append(this.live);
    }
  });
}
