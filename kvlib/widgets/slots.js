// Slot explorer: rows of a batch against the slots of their caches.

// What a control becomes when `wanted` is asked of it, and the remark that says why it is not more or less.
// A row never holds more than its capacity, and never appends more than the call offers.
function settleSlots(state, field, row, wanted, ceilings) {
  const { lengths, counts, n_queries, capacity } = state;
  const replace = (list, value) => list.map((old, b) => (b === row ? value : old));
  const within = (low, tooLow, high, tooHigh) =>
    [clamp(wanted, low, high), wanted < low ? tooLow : wanted > high ? tooHigh : ""];

  if (field === "capacity") {
    const held = lengths.map((length, b) => length + counts[b]);
    const most = Math.max(1, ...held);
    const [value, note] = within(
      most, held.includes(most) ? `Capacity stops at ${most}: row ${held.indexOf(most)} holds ${most} after the call.`
        : "Capacity stops at 1: a cache has at least one slot.",
      ceilings.capacity, `Capacity stops at ${ceilings.capacity} in this picture.`);
    return [{ capacity: value }, note];
  }
  if (field === "n_queries") {
    const [value, note] = within(0, "A call cannot offer fewer than 0 slots.",
      ceilings.n_queries, `This picture offers at most ${ceilings.n_queries} slots per call.`);
    const cut = counts.flatMap((count, b) => (count > value ? [`row ${b}`] : []));
    const cutNote = cut.length ? `The call now offers ${value}, so ${cut.join(" and ")} appends only ${value}.` : "";
    return [{ n_queries: value, counts: counts.map((count) => Math.min(count, value)) }, note || cutNote];
  }
  if (field === "lengths") {
    const most = capacity - counts[row];
    const [value, note] = within(0, `Row ${row} cannot hold fewer than 0 slots.`,
      most, `Row ${row} stops at length ${most}: with ${counts[row]} appended, its ${capacity} slots are full.`);
    return [{ lengths: replace(lengths, value) }, note];
  }
  const free = capacity - lengths[row];
  const [value, note] = within(0, `Row ${row} cannot append fewer than 0.`, Math.min(n_queries, free),
    free < n_queries ? `Row ${row} can append at most ${free}: ${lengths[row]} of its ${capacity} slots are filled.`
      : `Row ${row} can append at most ${n_queries}: the call offers no more.`);
  return [{ counts: replace(counts, value) }, note];
}

// The batch after the call, with the next call ready: each row appends as much again, or what still fits.
function appendSlots({ lengths, counts, capacity }) {
  if (counts.every((count) => count === 0)) {
    return [{}, "No row appends anything. Raise a count or lower a length first, or reset."];
  }
  const held = lengths.map((length, b) => length + counts[b]);
  const next = counts.map((count, b) => Math.min(count, capacity - held[b]));
  const cut = next.flatMap((count, b) => (count < counts[b] ? [`row ${b} has room for ${count || "no"} more`] : []));
  const note = `Appended. The rows now hold ${held.join(", ")} slots${cut.length ? `; ${cut.join(", ")}` : ""}.`;
  return [{ lengths: held, counts: next }, note];
}

function buildSlots(model, root, redraw) {
  const fields = ["lengths", "counts", "n_queries", "capacity", "selected"];
  const read = () => Object.fromEntries(fields.map((name) => [name, model.get(name)]));
  const start = read();
  const ceilings = { capacity: Math.max(64, start.capacity), n_queries: Math.max(16, start.n_queries) };
  const speech = speaker("Row 00, query 00, slot 000: not attended. Slot 000 holds a token appended after query 00 "
    + "in this call: it is the future. Query 00 attends slots 0 to 000.");
  let preview = null, note = "", shape = "", rows = [];

  // A remark stands in place of the sentence until the reader turns to a cell.
  function act([values, remark]) {
    note = remark;
    change(model, values);
    redraw();
  }
  function look(at) {
    preview = at;
    note = "";
    redraw();
  }
  const control = (field, label, spoken, row) =>
    stepper(label, spoken, (wanted) => act(settleSlots(read(), field, row, wanted, ceilings)));
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

  function update() {
    const state = read();
    const { lengths, counts, n_queries, capacity: slots } = state;
    capacity.show(slots);
    offered.show(n_queries);
    const wanted = [lengths.length, n_queries, slots].join();
    if (shape !== wanted) {
      const held = body.contains(document.activeElement) && document.activeElement.matches(".kv-cell");
      shape = wanted;
      preview = null;
      rows = lengths.map((_, b) => buildRow(b, n_queries, slots));
      body.replaceChildren(...rows.map((row) => row.el));
      if (held) body.querySelector(".kv-cell")?.focus();
    }
    rows.forEach((_, b) => showRow(b, state));
    if (n_queries === 0) return note ? speech.say(note) : speech.say(...TEXT.NO_QUERY);
    const selected = [lengths.length, n_queries, slots].map((n, i) => Math.min(state.selected[i], n - 1));
    const [b, t, j] = preview ?? selected;
    rows.forEach(({ grid }, row) => grid.mark(row === selected[0] ? selected.slice(1) : null, row === b ? [t, j] : null));
    if (note) return speech.say(note);
    const cell = [j, t, lengths[b], counts[b]];
    speech.say(
      `Row ${b}, query ${t}, slot ${j}: ${visibility.mayAttend(...cell) ? "attended" : "not attended"}.`,
      explain(...cell));
  }
  return { fields, update };
}
