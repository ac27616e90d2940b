"use strict";
const panels = JSON.parse(document.getElementById("data").textContent);
const symbols = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"];
const glyphs = ["M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M2.5 2.5h7v7h-7z", "M6 2l4.5 8h-9z",
  "M6 1.5l4.5 4.5L6 10.5 1.5 6z", "M6 10l4.5-8h-9z", "M4.5 2h3v2.5H10v3H7.5V10h-3V7.5H2v-3h2.5z"];
const PARTS = ["router", "dispatch", "experts", "combine", "host", "runtime"];
const NAMES = { router: "router", dispatch: "dispatch", experts: "experts", combine: "combine",
  host: "rest of the network", runtime: "between nodes" };
const hidden = new Set();
const unique = values => [...new Set(values)];
const byId = id => document.getElementById(id);
const config = { displayModeBar: false, responsive: true };
let shown = panels[0];
let graph = null;

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Past six lines the colours come again, with other marks.
const ink = line => colour("--c" + line.look % 6);
const mark = line => (line.look + Math.floor(line.look / 6)) % 6;
const visible = () => shown.lines.filter(line => !hidden.has(line.name));
const base = () => shown.reference && !hidden.has(shown.reference.name) ? shown.reference : null;

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function segments(id, values, current, label, choose) {
  byId(id).replaceChildren(...(values.length < 2 ? [] : values.map(value => {
    const button = element("button", { textContent: label(value), type: "button" });
    button.setAttribute("aria-pressed", value === current);
    button.onclick = () => { choose(value); render(); };
    return button;
  })));
}

function controls() {
  segments("models", unique(panels.map(p => p.model)), shown.model, m => m, model => {
    const same = panels.filter(p => p.model === model);
    shown = same.find(p => p.batch === shown.batch) || same[0];
  });
  const batches = panels.filter(p => p.model === shown.model).map(p => p.batch);
  segments("batches", batches, shown.batch, b => "batch " + b, batch => {
    shown = panels.find(p => p.model === shown.model && p.batch === batch);
  });
}

function legend() {
  const chips = shown.lines.map(line => [line.name, "--c" + line.look % 6, glyphs[mark(line)]]);
  if (shown.reference) chips.push([shown.reference.name, "--reference", null]);
  for (const limit of shown.limits) chips.push([limit.name, "--soft", null]);
  byId("legend").replaceChildren(...chips.map(([name, tint, glyph]) => {
    const button = element("button", { type: "button" });
    button.setAttribute("aria-pressed", !hidden.has(name));
    const drawn = glyph ? `<path d="${glyph}" fill="var(${tint})"/>`
      : tint === "--soft"
        ? `<path d="M0 6h12" stroke="var(${tint})" stroke-width="1.5" stroke-dasharray="1.5 2"/>`
        : `<path d="M0 6h12" stroke="var(${tint})" stroke-width="2" stroke-dasharray="4 2.5"/>`;
    button.innerHTML = `<svg width="12" height="12" aria-hidden="true">${drawn}</svg>`;
    button.append(name);
    button.onclick = () => {
      if (!hidden.delete(name)) hidden.add(name);
      render();
    };
    return button;
  }));
}

function axis(extra) {
  return Object.assign({ gridcolor: colour("--faint"), linecolor: colour("--faint"),
    zeroline: false, automargin: true, fixedrange: true }, extra);
}

function frame(extra) {
  return Object.assign({
    margin: { l: 8, r: 8, t: 14, b: 8 }, showlegend: false,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: colour("--soft"), size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--faint"), align: "left",
      font: { color: colour("--ink"), size: 12 } },
  }, extra);
}

function overK(yaxis, extra) {
  const ks = shown.ks;
  const pad = 0.09 * Math.max(1, Math.log2(ks.at(-1) / ks[0]));
  return frame(Object.assign({
    hovermode: "x unified",
    xaxis: axis({ type: "log", showgrid: false, tickvals: ks, ticktext: ks.map(String),
      range: [Math.log10(ks[0]) - pad * 0.3, Math.log10(ks.at(-1)) + pad * 0.3],
      unifiedhovertitle: { text: "k = %{x} of " + shown.experts },
      title: { text: "experts kept, k of " + shown.experts } }),
    yaxis: axis(yaxis),
  }, extra));
}

function nothing(id, text) {
  Plotly.react(id, [], frame({ xaxis: { visible: false }, yaxis: { visible: false },
    annotations: [{ xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, text }] }),
  config);
}

function trace(line, values, texts, extra) {
  return Object.assign({ x: line.points.map(p => p.k), y: values, text: texts, name: line.name,
    mode: "lines+markers", line: { color: ink(line), width: 2 },
    marker: { color: ink(line), size: 8, symbol: symbols[mark(line)] },
    hovertemplate: "%{text}" }, extra);
}

// Engines with one k mostly agree in accuracy: earlier marks are larger, so all can be seen.
function nested(line) {
  return { color: ink(line), symbol: symbols[mark(line)],
    size: Math.max(5, 15 - 3 * shown.lines.indexOf(line)) };
}

function level(value, text) {
  const first = shown.ks[0], last = shown.ks.at(-1);
  const x = [first / 4, ...shown.ks, last * 4];
  return { x, y: x.map(() => value), text: x.map(() => text), name: shown.reference.name,
    mode: "lines", line: { color: colour("--reference"), width: 2, dash: "dash" },
    hovertemplate: "%{text}" };
}

function bars(points, above, below) {
  return { type: "data", symmetric: false, thickness: 1.2, width: 3,
    array: points.map(p => p[above]), arrayminus: points.map(p => p[below]) };
}

// The rounds of the untouched model, as a band around its line.
function band(point, top) {
  const first = shown.ks[0], last = shown.ks.at(-1);
  const edge = (value, extra) => Object.assign({ x: [first / 4, last * 4], y: [value, value],
    mode: "lines", line: { width: 0 }, hoverinfo: "skip" }, extra);
  return [edge(point.median - point.below), edge(Math.min(point.median + point.above, top),
    { fill: "tonexty", fillcolor: colour("--band") })];
}

function latency() {
  const logarithmic = byId("log").checked;
  const top = logarithmic ? Infinity : shown.top;
  const traces = visible().map(line => trace(line, line.points.map(p => p.median),
    line.points.map(p => p.latency), { error_y: Object.assign(bars(line.points, "above", "below"),
      { array: line.points.map(p => Math.min(p.above, top - p.median)) }) }));
  for (const line of logarithmic ? [] : visible()) {
    const cut = line.points.filter(p => p.cut);
    if (cut.length) traces.push({ x: cut.map(p => p.k), y: cut.map(() => 0.985 * top),
      mode: "markers", hoverinfo: "skip", cliponaxis: false,
      marker: { symbol: "triangle-up", size: 8, color: ink(line) } });
  }
  if (base() && base().median !== null) {
    traces.unshift(...band(base(), top), level(base().median, base().latency));
  }
  for (const limit of shown.limits.filter(each => !hidden.has(each.name))) {
    traces.push({ x: limit.points.map(p => p.k), y: limit.points.map(p => p.ms), mode: "lines",
      text: limit.points.map(p => ms(p.ms) + " ms"), name: limit.name,
      hovertemplate: "%{text}", line: { color: colour("--soft"), width: 1.2, dash: "dot" } });
  }
  const yaxis = { title: { text: "median, ms" }, type: logarithmic ? "log" : "linear" };
  if (!logarithmic) yaxis.range = [0, shown.top];
  Plotly.react("latency", traces, overK(yaxis), config);
}

function quality() {
  const perplexity = shown.quality === "perplexity";
  byId("quality-title").textContent = (perplexity ? "Perplexity" : "Accuracy") + " over k";
  const traces = visible().map(line => trace(line, line.points.map(p => p.quality),
    line.points.map(p => p.accuracy), { connectgaps: true, marker: nested(line),
      error_y: bars(line.points, "quality_above", "quality_below") }));
  const known = base() && base().quality !== null ? base() : null;
  if (known) traces.unshift(level(known.quality, known.accuracy));
  const judged = visible().flatMap(line => line.points).filter(p => p.quality !== null);
  if (!judged.length && !known) {
    nothing("accuracy", "");
    return;
  }
  // The bars belong to the chart, too.
  const low = Math.min(...judged.map(p => p.quality - p.quality_below), known?.quality ?? Infinity);
  const high = Math.max(...judged.map(p => p.quality + p.quality_above), known?.quality ?? 0);
  const room = Math.max(0.08 * (high - low), perplexity ? 0.01 * high : 0.004);
  const range = [Math.max(0, low - room), high + room];
  const extra = {};
  if (known && known.quality > 0 && !perplexity) {
    extra.yaxis2 = axis({ overlaying: "y", side: "right", showgrid: false,
      tickmode: "auto", tickformat: ".0%",
      range: range.map(v => v / known.quality), title: { text: "of all experts' accuracy" } });
    // An axis is drawn only where a trace uses it.
    traces.push({ x: shown.ks, y: shown.ks.map(() => null), yaxis: "y2", hoverinfo: "skip" });
  }
  const yaxis = perplexity ? { title: { text: "perplexity, less is better" }, range }
    : { title: { text: "top-1 accuracy" }, tickformat: ".0%", range };
  Plotly.react("accuracy", traces, overK(yaxis, extra), config);
}

function pareto() {
  const known = p => p.median !== null && p.kept !== null;
  const traces = visible().map(line => ({ points: line.points.filter(known), line }))
    .filter(each => each.points.length)
    .map(({ points, line }) => ({ x: points.map(p => p.median), y: points.map(p => p.kept),
      text: points.map(p => p.row), name: line.name, mode: "markers", hovertemplate: "%{text}",
      hoverlabel: { namelength: 0 },
      marker: { color: ink(line), size: 10, symbol: symbols[mark(line)],
        opacity: points.map(p => p.front ? 1 : 0.45),
        line: { width: points.map(p => p.front ? 1.5 : 0), color: colour("--ink") } } }));
  const reference = base();
  if (reference && known(reference)) {
    traces.push({ x: [reference.median], y: [reference.kept], text: [reference.row],
      name: reference.name, mode: "markers", hovertemplate: "%{text}",
      hoverlabel: { namelength: 0 }, marker: { color: colour("--reference"), size: 12,
        symbol: "star" } });
  }
  if (!traces.length) {
    nothing("pareto", "");
    return;
  }
  const front = [...visible().flatMap(line => line.points), ...(reference ? [reference] : [])]
    .filter(p => known(p) && p.front).sort((a, b) => a.median - b.median);
  traces.unshift({ x: front.map(p => p.median), y: front.map(p => p.kept), mode: "lines",
    line: { color: colour("--soft"), width: 1.5, dash: "dot", shape: "hv" }, hoverinfo: "skip" });
  const kept = traces.flatMap(t => t.y);
  const [low, high] = [Math.min(...kept), Math.max(...kept)];
  const room = Math.max(0.06 * (high - low), 0.01);
  Plotly.react("pareto", traces, frame({ hovermode: "closest",
    xaxis: axis(Object.assign({ type: "log", title: { text: "median, ms: faster to the left" } },
      steps(traces.flatMap(t => t.x)))),
    yaxis: axis({ tickformat: ".0%", range: [Math.max(0, low - room), high + room],
      title: { text: "kept of the untouched model" } }) }), config);
}

// 1, 2, 5, 10, …: ticks of a logarithmic axis that read as numbers.
function steps(values) {
  const low = Math.floor(Math.log10(Math.min(...values)));
  const high = Math.ceil(Math.log10(Math.max(...values)));
  const tickvals = [];
  for (let power = low; power <= high; power++) {
    // Over a wide range the powers of ten are enough.
    for (const digit of high - low > 3 ? [1] : [1, 2, 5]) tickvals.push(digit * 10 ** power);
  }
  return { tickvals, ticktext: tickvals.map(v => String(Number(v.toPrecision(1)))) };
}

function routing() {
  const lines = visible().filter(line => line.points.some(p => p.exact !== null));
  if (!lines.length) {
    nothing("routing", "");
    return;
  }
  const traces = lines.map(line => trace(line, line.points.map(p => p.exact),
    line.points.map(p => p.agreement), { connectgaps: true, marker: nested(line) }));
  const lowest = Math.min(...traces.flatMap(t => t.y).filter(v => v !== null));
  const low = Math.max(0, Math.min(0.95, lowest - 0.02));
  Plotly.react("routing", traces, overK({ tickformat: ".0%", range: [low, 1 + 0.04 * (1 - low)],
    title: { text: "samples with the same experts" } }), config);
}

function stacked(id, names, values, unit, texts) {
  const host = byId(id);
  host.style.height = Math.max(130, 28 * names.length + 66) + "px";
  const traces = values.map(series => ({ type: "bar", orientation: "h", y: names,
    x: series.values, name: series.name, marker: { color: colour(series.ink) },
    text: series.values.map((v, i) => texts(series, i)), textposition: "none",
    hovertemplate: "%{text}<extra></extra>" }));
  Plotly.react(id, traces, frame({ barmode: "stack", bargap: 0.3,
    margin: { l: 8, r: 12, t: 8, b: 8 },
    xaxis: axis({ title: { text: unit } }),
    yaxis: axis({ autorange: "reversed", showgrid: false, ticksuffix: " " }) }), config);
}

function key(id, series) {
  byId(id).replaceChildren(...series.map(([name, tint]) => {
    const chip = element("span", { className: "key" });
    chip.innerHTML = `<i style="background: var(${tint})"></i>`;
    chip.append(name);
    return chip;
  }));
}

const ms = value => value >= 100 ? value.toFixed(0) : value.toPrecision(3);

function graphs() {
  return visible().flatMap(line => line.points.filter(p => p.parts.length)
    .map(point => ({ name: `${line.short}, k = ${point.k}`, point })));
}

function parts() {
  const all = graphs();
  byId("parts-card").hidden = !all.length;
  if (!all.length) return;
  key("parts-key", PARTS.map(part => [NAMES[part], "--" + part]));
  const sum = (point, part) => point.parts.filter(p => p.part === part)
    .reduce((total, p) => total + p.ms, 0);
  stacked("parts", all.map(g => g.name), PARTS.map(part => ({ name: NAMES[part],
    ink: "--" + part, values: all.map(g => sum(g.point, part)) })), "ms a call, as profiled",
  (series, i) => `${all[i].name}<br>${series.name}: ${ms(series.values[i])} ms`);
  if (!all.some(g => g.name === graph)) graph = all[0].name;
  byId("graph").replaceChildren(...all.map(g =>
    element("option", { value: g.name, textContent: g.name, selected: g.name === graph })));
  layers(all.find(g => g.name === graph).point);
}

function layers(point) {
  const rows = unique(point.parts.filter(p => p.layer !== null).map(p => p.layer));
  const ms_of = (layer, part) => point.parts
    .filter(p => p.layer === layer && p.part === part).reduce((t, p) => t + p.ms, 0);
  const names = [...rows, "network", "runtime"];
  const values = PARTS.map(part => ({ name: NAMES[part], ink: "--" + part,
    values: names.map(name => name === "network" ? (part === "host" ? ms_of(null, part) : 0)
      : name === "runtime" ? (part === "runtime" ? ms_of(null, part) : 0) : ms_of(name, part)) }));
  stacked("layers", names, values, "ms a call, as profiled",
    (series, i) => `${names[i]}<br>${series.name}: ${ms(series.values[i])} ms`);
}

function memory() {
  const all = visible().flatMap(line => line.points.filter(p => p.memory !== null)
    .map(p => ({ name: `${line.short}, k = ${p.k}`, p })));
  if (base() && base().memory !== null) all.unshift({ name: base().name, p: base() });
  byId("memory-card").hidden = !all.length;
  if (!all.length) return;
  key("memory-key", [["runtime alone", "--runtime"], ["model and batch", "--experts"]]);
  const held = all.map(each => each.p.runtime || 0);
  stacked("memory", all.map(each => each.name), [
    { name: "runtime alone", ink: "--runtime", values: held },
    { name: "model and batch", ink: "--experts",
      values: all.map((each, i) => each.p.memory - held[i]) },
  ], "MB", (series, i) => `${all[i].name}<br>${series.name}: ${series.values[i].toFixed(0)} MB, ` +
    `peak ${all[i].p.memory.toFixed(0)} MB`);
}

// Charts with nothing in them give their room to those beside them; a sentence says why.
function emptyCharts() {
  for (const id of ["accuracy", "pareto", "routing"]) {
    const figure = byId(id + "-figure");
    figure.hidden = id in shown.empty;
    if (byId(id + "-note")) byId(id + "-note").hidden = figure.hidden;
    const both = figure.parentElement;
    both.classList.toggle("single", [...both.children].some(each => each.hidden));
  }
  byId("cost-card").hidden = "pareto" in shown.empty && "routing" in shown.empty;
  byId("empty").textContent = Object.values(shown.empty).join(" ");
}

function render() {
  controls();
  emptyCharts();
  byId("summary").textContent = shown.summary;
  byId("caveat").textContent = shown.caveat;
  byId("tiles").innerHTML = shown.tiles;
  legend();
  for (const draw of [latency, quality, pareto, routing, parts, memory]) draw();
  for (const id of ["latency", "accuracy", "pareto", "routing"]) {
    if (byId(id).offsetParent) Plotly.Plots.resize(id);
  }
}

// The table: every row is in the page; filters hide rows, a click on a heading sorts them.
const rows = [...document.querySelectorAll("#rows tbody tr")];
const columns = [["model", "Model"], ["batch", "Batch"], ["engine", "Engine"],
  ["precision", "Precision"], ["k", "k"]];

function filters() {
  const host = byId("filters");
  const pick = {};
  const search = element("input", { type: "search", placeholder: "any word", id: "search" });
  const count = element("output", { id: "count" });
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of rows) {
      const fits = Object.entries(pick).every(([key, select]) =>
        !select.value || row.dataset[key] === select.value)
        && words.every(word => row.textContent.toLowerCase().includes(word));
      row.hidden = !fits;
      left += fits;
    }
    count.textContent = `${left} of ${rows.length} rows`;
  };
  for (const [key, label] of columns) {
    const values = unique(rows.map(row => row.dataset[key]));
    if (values.length < 2) continue;
    if (values.every(value => value !== "" && !isNaN(value))) values.sort((a, b) => a - b);
    const select = element("select", { id: "filter-" + key, onchange: apply },
      element("option", { value: "", textContent: "all" }),
      ...values.map(value => element("option", { value, textContent: value })));
    pick[key] = select;
    host.append(element("label", {}, label, select));
  }
  search.oninput = apply;
  host.append(element("label", {}, "Search", search), count);
  apply();
}

function sorting() {
  const body = document.querySelector("#rows tbody");
  const heads = [...document.querySelectorAll("#rows thead th")];
  heads.forEach((head, column) => {
    const button = element("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.onclick = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = row => row.cells[column] ? row.cells[column].dataset.v ?? "" : "";
      const sorted = [...rows].sort((a, b) => {
        const x = value(a), y = value(b);
        // Rows without the value stay below, whichever way it is sorted.
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return up ? order : -order;
      });
      body.append(...sorted);
    };
  });
}

if (rows.length) { filters(); sorting(); }
byId("log").onchange = latency;
byId("graph").onchange = event => { graph = event.target.value; parts(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
if (panels.length) render();
else for (const id of ["parts-card", "memory-card"]) byId(id).hidden = true;
