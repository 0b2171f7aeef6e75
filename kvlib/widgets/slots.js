// Slot explorer: rows of a batch against the slots of their caches.

// What changes when `wanted` is asked of a control, and the remark that says why it is not more or less.
// A row never holds more than its capacity, and never appends more than the call offers.
const settleSlots = {
  capacity({ lengths, counts }, wanted, most) {
    const held = lengths.map((length, b) => length + counts[b]);
    const least = Math.max(1, ...held);
    const [capacity, note] = within(wanted, least, held.includes(least)
      ? `Capacity stops at ${least}: row ${held.indexOf(least)} holds ${least} after the call.`
      : "Capacity stops at 1: a cache has at least one slot.",
    most, `Capacity stops at ${most} in this picture.`);
    return [{ capacity }, note];
  },
  n_queries({ counts }, wanted, most) {
    const [n_queries, note] = within(wanted, 0, "A call cannot offer fewer than 0 slots.",
      most, `This picture offers at most ${most} slots per call.`);
    const cut = counts.flatMap((count, b) => (count > n_queries ? [`row ${b}`] : []));
    const cutNote = cut.length ? `The call now offers ${n_queries}: that is all for ${cut.join(", ")}.` : "";
    return [{ n_queries, counts: counts.map((count) => Math.min(count, n_queries)) }, note || cutNote];
  },
  lengths({ lengths, counts, capacity }, wanted, _, row) {
    const most = capacity - counts[row];
    const [length, note] = within(wanted, 0, `Row ${row} cannot hold fewer than 0 slots.`,
      most, `Row ${row} stops at length ${most}: with ${counts[row]} appended, its ${capacity} slots are full.`);
    return [{ lengths: lengths.with(row, length) }, note];
  },
  counts({ lengths, counts, n_queries, capacity }, wanted, _, row) {
    const free = capacity - lengths[row];
    const [count, note] = within(wanted, 0, `Row ${row} cannot append fewer than 0.`,
      Math.min(n_queries, free), free < n_queries
        ? `Row ${row} can append at most ${free}: ${lengths[row]} of its ${capacity} slots are filled.`
        : `Row ${row} can append at most ${n_queries}: the call offers no more.`);
    return [{ counts: counts.with(row, count) }, note];
  },
};

// A number within its limits, and what to say if another was wanted.
function within(wanted, low, tooLow, high, tooHigh) {
  return [clamp(wanted, low, high), wanted < low ? tooLow : wanted > high ? tooHigh : ""];
}

// The batch after the call, with the next call ready: each row appends as much again, or what still fits.
function appendSlots({ lengths, counts, capacity }) {
  if (counts.every((count) => count === 0)) {
    return [{}, "No row appends anything. Raise a count or lower a length first, or reset."];
  }
  const held = lengths.map((length, b) => length + counts[b]);
  const next = counts.map((count, b) => Math.min(count, capacity - held[b]));
  const cut = next.flatMap((count, b) => (count < counts[b] ? [`; row ${b} has room for ${count || "no"} more`] : []));
  const note = `Appended. The rows now hold ${held.join(", ")} slots${cut.join("")}.`;
  return [{ lengths: held, counts: next }, note];
}

function buildSlots(model, root, redraw) {
  const fields = ["lengths", "counts", "n_queries", "capacity", "selected"];
  const read = () => Object.fromEntries(fields.map((name) => [name, model.get(name)]));
  const start = read();
  const ceilings = { capacity: Math.max(64, start.capacity), n_queries: Math.max(16, start.n_queries) };
  const speech = speaker("Row 00, query 00, slot 000: not attended. Slot 000 holds a token appended "
    + "after query 00 in this call: it is the future. Query 00 attends slots 0 to 000.");
  let preview = null, note = "", shape = "", rows = [];

  // Turn to a cell, null for the selected one, or to a remark in its place.
  function look(at, remark = "") {
    preview = at;
    note = remark;
    redraw();
  }
  function act([values, remark]) {
    change(model, values);
    look(null, remark);
  }
  const control = (field, label, spoken, row) =>
    stepper(label, spoken, (wanted) => act(settleSlots[field](read(), wanted, ceilings[field], row)));
  const capacity = control("capacity", "Capacity", "Capacity, slots per row");
  const offered = control("n_queries", "Offered per call", "Offered per call, new slots");
  const button = (text, onclick) => h("button", { type: "button", class: "kv-button", onclick }, text);
  const body = h("div", { class: "kv-rows" });
  root.append(
    h("div", { class: "kv-head" }, capacity.el, offered.el, h("span", { class: "kv-buttons" },
      button("Append", () => act(appendSlots(read()))),
      button("Reset", () => act([start, "Back to the start."])))),
    body, speech.el, legend(Object.keys(TEXT.GLYPHS)));

  function buildRow(b, n_queries, capacity) {
    const length = control("lengths", "length", `Row ${b}, length before the call`, b);
    const count = control("counts", "appends", `Row ${b}, slots it appends`, b);
    const filled = h("span", {}), written = h("span", { class: "kv-written" });
    const heads = range(capacity).map((slot) => h("span", { role: "columnheader" }, String(slot)));
    const grid = makeGrid({
      label: `Row ${b}, queries against cache slots`,
      corner: h("span", { role: "columnheader", class: "kv-rowhead" }, "cache"),
      columnHeads: heads,
      rowHeads: range(n_queries).map((t) => h("span", { role: "rowheader", class: "kv-rowhead" }, `query ${t}`)),
      onselect(t, j) {
        change(model, { selected: [b, t, j] });
        look(null);
      },
      onpreview: (at) => look(at && [b, ...at]),
    });
    const el = h("div", { class: "kv-row", role: "group", "aria-label": `Row ${b}` },
      h("div", { class: "kv-side" }, h("b", {}, `Row ${b}`), length.el, count.el,
        h("p", { class: "kv-holds" }, filled, written, ` of ${capacity}`)),
      h("div", { class: "kv-scroll" }, grid.el));
    return { el, length, count, filled, written, heads, grid };
  }

  function showRow(b, { lengths, counts, capacity, n_queries }) {
    const { length, count, filled, written, heads, grid } = rows[b];
    const [old, appended] = [lengths[b], counts[b]];
    length.show(old);
    count.show(appended);
    filled.textContent = `${old} filled`;
    written.textContent = ` + ${appended} written`;
    heads.forEach((head, j) => {
      const [look, spoken] = j < old ? ["live", "filled before the call"]
        : j < old + appended ? ["new", "written by this call"] : ["free", "unused"];
      head.className = `kv-slot kv-${look}-slot`;
      head.setAttribute("aria-label", `Slot ${j}, ${spoken}`);
    });
    range(n_queries).forEach((t) => range(capacity).forEach((j) => {
      const name = visibility.state(j, t, old, appended);
      paint(grid.cells[t][j], name, TEXT.GLYPHS[name], `Query ${t}, slot ${j}: ${TEXT.LABELS[name]}`);
    }));
  }

  // Rows, queries and slots may change in number: then the grids are made anew. Says if that took the focus.
  function fit({ lengths, n_queries, capacity }) {
    const wanted = [lengths.length, n_queries, capacity].join();
    if (shape === wanted) return false;
    const focused = body.querySelector(".kv-cell:focus") !== null;
    shape = wanted;
    preview = null;
    rows = lengths.map((_, b) => buildRow(b, n_queries, capacity));
    body.replaceChildren(...rows.map((row) => row.el));
    return focused;
  }

  function speak([b, t, j], { lengths, counts }) {
    const cell = [j, t, lengths[b], counts[b]];
    const verdict = visibility.mayAttend(...cell) ? "attended" : "not attended";
    speech.say(`Row ${b}, query ${t}, slot ${j}: ${verdict}.`, explain(...cell));
  }

  function update() {
    const state = read();
    const sizes = [state.lengths.length, state.n_queries, state.capacity];
    capacity.show(state.capacity);
    offered.show(state.n_queries);
    const lostFocus = fit(state);
    const selected = sizes.map((size, i) => Math.min(state.selected[i], size - 1));
    const spoken = preview ?? selected;
    rows.forEach(({ grid }, b) => {
      showRow(b, state);
      const at = ([row, ...place]) => (row === b && state.n_queries > 0 ? place : null);
      grid.mark(at(selected), at(spoken));
    });
    if (lostFocus) body.querySelector("[aria-selected]")?.focus();
    if (note) speech.say(note);
    else if (state.n_queries === 0) speech.say(...TEXT.NO_QUERY);
    else speak(spoken, state);
  }
  return { fields, update };
}
