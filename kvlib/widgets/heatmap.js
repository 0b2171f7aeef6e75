// Attention heatmap: queries against slots, with the weight in each cell.

// The scores of one query on the slots it may attend, from slot 0 on: its highest score, and how far
// each lies below it. Gaps keep the softmax exact to float32 however large the scores are.
// Order of the numbers: layer, row, head, appended query; for each the peak, then the gaps.
function heatmapScores({ numbers, shape, lengths, counts }, layer, row, head, query) {
  const heads = shape[2];
  const before = (b, t) => t * (lengths[b] + 1) + (t * (t + 1)) / 2;   // numbers of the queries before t
  const whole = (b) => before(b, counts[b]);
  const rowsBefore = (end) => range(end).reduce((sum, b) => sum + heads * whole(b), 0);
  const at = layer * rowsBefore(lengths.length) + rowsBefore(row) + head * whole(row) + before(row, query);
  const [peak, ...gaps] = numbers.subarray(at, at + lengths[row] + query + 2);
  return { peak, gaps };
}

function softmaxOfGaps(gaps) {
  const powers = gaps.map(Math.exp);
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

function readFloats(base64) {
  return new Float32Array(Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)).buffer);
}

const weightText = (weight) => (weight > 0 && weight < 0.00005 ? "below 0.0001" : weight.toFixed(4));
const scoreText = (score) => (Math.abs(score) < 1e6 ? score.toFixed(3) : score.toExponential(3));
const cellText = (weight) => (weight >= 0.995 ? "1.0" : weight.toFixed(2).slice(1));
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const tokenText = (token) => token.replace(/[ \n\t]/g, (space) => TEXT.SPACES[space]);

function buildHeatmap(model, root, redraw) {
  const fields = ["layer", "row", "head", "selected"];
  const data = { ...model.get("data"), numbers: readFloats(model.get("data").numbers) };
  const [layers, rows, heads, queries, capacity] = data.shape;
  const { lengths, counts, tokens } = data;
  const share = heads / data.n_kv_heads;
  const tokenAt = (row, slot) => (slot < lengths[row] + counts[row] ? tokens?.[row][slot] : undefined);
  const ownSlot = (row, t) => (t < counts[row] ? lengths[row] + t : capacity);
  const longest = (tokens ?? []).flat().reduce((long, token) => (token.length > long.length ? token : long), "");
  const speech = speaker(
    `${place(layers, rows, heads, 100, longest, 100, longest)}: weight below 0.0001, score -100.000. `
    + "Slot 100 holds a token appended before query 100 in this call. Query 100 attends slots 0 to 100.");
  let preview = null, note = "";

  const pick = (name, n) => stepper(capital(name), capital(name), (wanted) => {
    const value = clamp(wanted, 0, n - 1);
    change(model, { [name]: value });
    look(null, value === wanted ? "" : `The ${name}s go from 0 to ${n - 1}.`);
  });
  const layerPick = pick("layer", layers), rowPick = pick("row", rows);
  const headPick = headChooser();
  const slotHeads = range(capacity).map((j) => h("span", { role: "columnheader", class: "kv-slot" }));
  const queryHeads = range(queries).map((t) => h("span", { role: "rowheader", class: "kv-rowhead" }));
  const sums = range(queries).map(() => h("span", { role: "gridcell", class: "kv-sum" }));
  const grid = makeGrid({
    label: "Queries against cache slots, attention weights",
    corner: h("span", { role: "columnheader", class: "kv-rowhead" }, "query"),
    columnHeads: slotHeads,
    rowHeads: queryHeads,
    tails: [h("span", { role: "columnheader", class: "kv-sum" }, "sum"), ...sums],
    onselect(t, j) {
      change(model, { selected: [t, j] });
      look(null);
    },
    onpreview: look,
  });
  const choices = [[layers, layerPick.el], [rows, rowPick.el], [heads, headPick]].filter(([n]) => n > 1);
  if (choices.length) root.append(h("div", { class: "kv-head" }, ...choices.map(([, el]) => el)));
  root.append(
    h("div", { class: `kv-scroll kv-heat${tokens ? " kv-named" : ""}` }, grid.el), speech.el,
    h("div", { class: "kv-foot" }, scale(), "masked:", legend(["future", "unused", "idle"])),
    h("p", { class: "kv-caption" }, TEXT.HEATMAP_CAPTION));

  // Turn to a cell, null for the selected one, or to a remark in its place.
  function look(at, remark = "") {
    preview = at;
    note = remark;
    redraw();
  }

  // Where a cell is, in words; what there is only one of goes without saying.
  function place(layer, row, head, query, queryToken, slot, slotToken) {
    const quoted = (token) => (token === undefined ? "" : ` “${tokenText(token)}”`);
    return capital([
      layers > 1 ? `layer ${layer}` : "", rows > 1 ? `row ${row}` : "",
      heads > 1 ? `head ${head}${share > 1 ? ` of KV head ${Math.floor(head / share)}` : ""}` : "",
      `query ${query}${quoted(queryToken)}`, `key in slot ${slot}${quoted(slotToken)}`,
    ].filter(Boolean).join(", "));
  }

  // Radio buttons of one form are one group, so widgets share no names. It has no label of its own,
  // which would make it a landmark of the page: its legends say what it is.
  function headChooser() {
    const radio = (i) => h("label", {},
      h("input", { type: "radio", name: "head", value: i, "aria-label": `Head ${i}` }),
      h("span", { "aria-hidden": "true" }, String(i)));
    const group = (name, members) =>
      h("fieldset", {}, h("legend", {}, name), h("div", {}, ...members.map(radio)));
    const shared = (k) => group(`Heads of KV head ${k}`, range(share).map((i) => k * share + i));
    const groups = share === 1 ? [group("Head", range(heads))] : range(data.n_kv_heads).map(shared);
    return h("form", {
      class: "kv-heads", autocomplete: "off",
      onsubmit: (event) => event.preventDefault(),
      onchange(event) {
        change(model, { head: Number(event.target.value) });
        look(null);
      },
    }, ...groups);
  }

  function scale() {
    const steps = [0, 0.25, 0.5, 0.75, 1].map((weight) => {
      const cell = h("span", { class: "kv-cell" });
      paintWeight(cell, weight, "");
      return cell;
    });
    return h("span", { class: "kv-scale", "aria-hidden": "true" }, "weight", ...steps);
  }

  function paintWeight(cell, weight, label) {
    paint(cell, "weight", cellText(weight), label);
    cell.style.setProperty("--kv-weight", weight);
  }

  function showTokens(row) {
    const label = (el, text, slot) => {
      el.replaceChildren(text);
      if (tokens) el.append(h("small", {}, tokenText(tokenAt(row, slot) ?? "")));
    };
    slotHeads.forEach((el, j) => label(el, String(j), j));
    queryHeads.forEach((el, t) => label(el, tokens ? String(t) : `query ${t}`, ownSlot(row, t)));
  }

  // Scores and weights of a query on the slots it attends; an idle one attends none.
  function attention(layer, row, head, t) {
    if (t >= counts[row]) return { scores: [], weights: [] };
    const { peak, gaps } = heatmapScores(data, layer, row, head, t);
    return { scores: gaps.map((gap) => peak + gap), weights: softmaxOfGaps(gaps) };
  }

  function showQuery(t, row, weights) {
    grid.cells[t].forEach((cell, j) => {
      const name = visibility.state(j, t, lengths[row], counts[row]);
      if (visibility.mayAttend(j, t, lengths[row], counts[row])) {
        paintWeight(cell, weights[j], `Query ${t}, slot ${j}: weight ${weightText(weights[j])}`);
      } else paint(cell, name, TEXT.GLYPHS[name], `Query ${t}, slot ${j}: masked, ${TEXT.LABELS[name]}`);
    });
    sums[t].textContent = weights.reduce((sum, weight) => sum + weight, 0).toFixed(2);
  }

  function speak([t, j], [layer, row, head], { scores, weights }) {
    const cell = [j, t, lengths[row], counts[row]];
    const result = visibility.mayAttend(...cell)
      ? `weight ${weightText(weights[j])}, score ${scoreText(scores[j])}` : "masked, no weight";
    const where = place(layer, row, head, t, tokenAt(row, ownSlot(row, t)), j, tokenAt(row, j));
    speech.say(`${where}: ${result}.`, explain(...cell));
  }

  function update() {
    const picture = ["layer", "row", "head"].map((name) => model.get(name));
    const [layer, row, head] = picture;
    layerPick.show(layer);
    rowPick.show(row);
    headPick.querySelector(`[value="${head}"]`).checked = true;
    showTokens(row);
    const attended = range(queries).map((t) => attention(layer, row, head, t));
    attended.forEach(({ weights }, t) => showQuery(t, row, weights));
    const selected = model.get("selected");
    const spoken = preview ?? selected;
    if (queries > 0) grid.mark(selected, spoken);
    if (note) speech.say(note);
    else if (queries === 0) speech.say(...TEXT.NO_QUERY);
    else speak(spoken, picture, attended[spoken[0]]);
  }
  return { fields, update };
}
