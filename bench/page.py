"""The look of the report: its page, style and the script that draws the charts.

The page fetches nothing: plotly.js, style and data are in it. Placeholders are `%%NAME%%`.
"""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>%%TITLE%%</title>
<style>%%STYLE%%</style>
</head>
<body>
<main>
<header>
  <p class="eyebrow">moexport benchmark<span>%%CREATED%%</span></p>
  <nav class="controls" aria-label="What is shown">
    <div class="segments" id="models" role="group" aria-label="Model"></div>
    <div class="segments" id="batches" role="group" aria-label="Batch size"></div>
  </nav>
  <h1 id="summary">%%SUMMARY%%</h1>
  <p id="caveat">%%CAVEAT%%</p>
  <p class="rule">%%RULE%%</p>
</header>
<dl class="tiles" id="tiles">%%TILES%%</dl>
<section class="card">
  <div class="legend" id="legend"></div>
  <div class="charts">
    <figure>
      <figcaption>Latency over k
        <label class="toggle"><input type="checkbox" id="log"> log scale</label></figcaption>
      <div class="chart" id="latency"></div>
    </figure>
    <figure>
      <figcaption>Accuracy over k</figcaption>
      <div class="chart" id="accuracy"></div>
    </figure>
  </div>
  <p class="note">%%CHART_NOTE%%</p>
</section>
<section class="card"><h2>Routing agreement and parity</h2>%%ROUTING%%</section>
<section class="card"><h2>All rows</h2>%%ROWS%%</section>
<section class="card pair">
  <div><h2>Environment</h2>%%ENVIRONMENT%%</div>
  <div><h2>How it was measured</h2>%%METHOD%%</div>
</section>
<footer>Made by moexport from results.json; it can be made again with
<code>moexport report results.json</code>.</footer>
</main>
<script type="application/json" id="data">%%DATA%%</script>
<script>%%PLOTLY%%</script>
<script>%%SCRIPT%%</script>
</body>
</html>
"""

STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #1a212c; --soft: #566172; --faint: #e3e7ed;
  --accent: #2563c9; --bad: #b3261e; --zebra: #f9fafb;
  --c0: #2563c9; --c1: #c2571a; --c2: #12825f; --c3: #8a4fbf; --c4: #a67c00; --c5: #c23b6b;
  --reference: #5b6472;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --ink: #e7ebf1; --soft: #9aa6b6; --faint: #2c3541;
    --accent: #7fb0ff; --bad: #ff8a80; --zebra: #1e252f;
    --c0: #7fb0ff; --c1: #ff9f66; --c2: #52cfa6; --c3: #c79bf2; --c4: #e3b94c; --c5: #f285ad;
    --reference: #9aa6b6;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 40px; }
.eyebrow { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 0 0 14px; font-weight: 600; }
.eyebrow span { color: var(--soft); font-weight: 400; }
h1 { font-size: clamp(1.25rem, 0.95rem + 1.5vw, 1.85rem); line-height: 1.3; font-weight: 650;
  letter-spacing: -0.01em; margin: 18px 0 6px; max-width: 34em; text-wrap: balance; }
h2 { font-size: 1.02rem; margin: 0 0 12px; }
#caveat { margin: 0 0 8px; font-size: 1.02rem; max-width: 80ch; }
#caveat:empty { display: none; }
.rule, .note, footer { color: var(--soft); font-size: 0.87rem; max-width: 80ch; }
.rule { margin: 0; }
.card > .note { margin: 12px 0 0; }
.controls { display: flex; flex-wrap: wrap; gap: 10px; }
.segments { display: inline-flex; flex-wrap: wrap; background: var(--faint); border-radius: 9px;
  padding: 3px; }
.segments:empty { display: none; }
button { font: inherit; color: inherit; border: 0; background: none; cursor: pointer; }
.segments button { padding: 5px 13px; border-radius: 7px; color: var(--soft); }
.segments button[aria-pressed="true"] { background: var(--card); color: var(--ink);
  font-weight: 600; box-shadow: 0 1px 2px rgb(0 0 0 / 0.12); }
button:focus-visible, input:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 20px 0 14px; }
.tiles div, .card { background: var(--card); border: 1px solid var(--faint); border-radius: 12px; }
.tiles div { padding: 12px 16px; }
dt { color: var(--soft); font-size: 0.83rem; }
.tiles dd { margin: 0; font-size: 1.5rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.tiles small { display: block; color: var(--soft); font-size: 0.8rem; font-weight: 400; }
.card { padding: 18px 20px; margin-bottom: 14px; }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 12px 24px; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; justify-content: space-between; font-weight: 600; }
.toggle { font-weight: 400; font-size: 0.85rem; color: var(--soft); cursor: pointer; }
.chart { height: 350px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 6px; margin: 0 0 12px -8px; }
.legend button { display: inline-flex; align-items: center; gap: 7px; padding: 3px 8px;
  border-radius: 7px; font-size: 0.87rem; }
.legend button:hover { background: var(--faint); }
.legend button[aria-pressed="false"] { opacity: 0.4; text-decoration: line-through; }
.legend svg { flex: none; }
.scroll { overflow-x: auto; margin: 0 -20px -4px; padding: 0 20px 4px; }
table { border-collapse: collapse; width: 100%; font-size: 0.86rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 4.5px 12px 6px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--faint); }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th.text, td.text { text-align: left; }
tr.reference td { background: var(--zebra); font-weight: 600; }
th[scope="rowgroup"] { text-align: left; color: var(--ink); font-weight: 600; padding-top: 16px; }
tbody:first-of-type th[scope="rowgroup"] { padding-top: 8px; }
td.error { color: var(--bad); text-align: left; white-space: normal; min-width: 22em; }
.quiet { color: var(--soft); }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 18px 32px; }
.pair > div { min-width: 0; }
.facts { display: grid; grid-template-columns: auto 1fr; gap: 4px 16px; margin: 0;
  font-size: 0.88rem; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 12px 0 0; padding: 10px 12px; background: var(--page); border-radius: 8px;
  font-size: 0.82rem; white-space: pre-wrap; overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 1.1em; font-size: 0.88rem; }
li { margin-bottom: 4px; }
footer { padding: 8px 4px; }
@media (max-width: 760px) {
  main { padding: 18px 12px 28px; }
  .charts, .pair { grid-template-columns: 1fr; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tiles div { padding: 10px 12px; }
  .tiles dd { font-size: 1.25rem; }
  .card { padding: 14px; }
  .scroll { margin: 0 -14px -4px; padding: 0 14px 4px; }
  .chart { height: 290px; }
}
@media print { .controls, .toggle { display: none; } .card { break-inside: avoid; } }
"""

SCRIPT = """
"use strict";
const panels = JSON.parse(document.getElementById("data").textContent);
const symbols = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"];
const glyphs = ["M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M2.5 2.5h7v7h-7z", "M6 2l4.5 8h-9z",
  "M6 1.5l4.5 4.5L6 10.5 1.5 6z", "M6 10l4.5-8h-9z", "M4.5 2h3v2.5H10v3H7.5V10h-3V7.5H2v-3h2.5z"];
const hidden = new Set();
const unique = values => [...new Set(values)];
let shown = panels[0];

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function segments(id, values, current, label, choose) {
  const host = document.getElementById(id);
  host.replaceChildren(...(values.length < 2 ? [] : values.map(value => {
    const button = document.createElement("button");
    button.textContent = label(value);
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
  const host = document.getElementById("legend");
  const chips = shown.lines.map(line => [line.name, "--c" + line.look % 6, glyphs[line.look % 6]]);
  if (shown.reference) chips.push([shown.reference.name, "--reference", null]);
  host.replaceChildren(...chips.map(([name, ink, glyph]) => {
    const button = document.createElement("button");
    button.setAttribute("aria-pressed", !hidden.has(name));
    const mark = glyph ? `<path d="${glyph}" fill="var(${ink})"/>`
      : `<path d="M0 6h12" stroke="var(${ink})" stroke-width="2" stroke-dasharray="4 2.5"/>`;
    button.innerHTML = `<svg width="12" height="12" aria-hidden="true">${mark}</svg>`;
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

function layout(yaxis, extra) {
  const ks = shown.ks;
  const pad = 0.09 * Math.max(1, Math.log2(ks.at(-1) / ks[0]));
  return Object.assign({
    margin: { l: 8, r: 8, t: 14, b: 8 }, showlegend: false, hovermode: "x unified",
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: colour("--soft"), size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--faint"),
      font: { color: colour("--ink"), size: 12 } },
    xaxis: axis({ type: "log", showgrid: false, tickvals: ks, ticktext: ks.map(String),
      range: [Math.log10(ks[0]) - pad * 0.3, Math.log10(ks.at(-1)) + pad * 0.3],
      unifiedhovertitle: { text: "k = %{x} of " + shown.experts },
      title: { text: "experts kept, k of " + shown.experts } }),
    yaxis: axis(yaxis),
  }, extra);
}

function trace(line, y, texts, extra) {
  const ink = colour("--c" + line.look % 6);
  return Object.assign({ x: line.points.map(p => p.k), y, text: texts, name: line.name,
    mode: "lines+markers", line: { color: ink, width: 2 },
    marker: { color: ink, size: 8, symbol: symbols[line.look % 6] },
    hovertemplate: "%{text}" }, extra);
}

// Engines with one k mostly agree in accuracy: earlier marks are larger, so all can be seen.
function nested(line) {
  return { color: colour("--c" + line.look % 6), symbol: symbols[line.look % 6],
    size: Math.max(5, 15 - 3 * shown.lines.indexOf(line)) };
}

function reference(value, text) {
  const first = shown.ks[0], last = shown.ks.at(-1);
  const x = [first / 4, ...shown.ks, last * 4];
  return { x, y: x.map(() => value), text: x.map(() => text), name: shown.reference.name,
    mode: "lines", line: { color: colour("--reference"), width: 2, dash: "dash" },
    hovertemplate: "%{text}" };
}

const config = { displayModeBar: false, responsive: true };

function latency() {
  const logarithmic = document.getElementById("log").checked;
  const traces = shown.lines.filter(line => !hidden.has(line.name)).map(line =>
    trace(line, line.points.map(p => p.median), line.points.map(p => p.latency), {
      error_y: { type: "data", symmetric: false, thickness: 1.2, width: 3,
        array: line.points.map(p => p.above), arrayminus: line.points.map(p => p.below) } }));
  const base = shown.reference;
  if (base && base.median !== null && !hidden.has(base.name)) {
    traces.unshift(reference(base.median, base.latency));
  }
  const yaxis = { title: { text: "median, ms" }, type: logarithmic ? "log" : "linear" };
  if (!logarithmic) yaxis.range = [0, shown.top];
  Plotly.react("latency", traces, layout(yaxis), config);
}

function accuracy() {
  const visible = shown.lines.filter(line => !hidden.has(line.name));
  const traces = visible.map(line => trace(line, line.points.map(p => p.top1),
    line.points.map(p => p.accuracy), { connectgaps: true, marker: nested(line) }));
  const base = shown.reference && shown.reference.top1 !== null ? shown.reference : null;
  if (base && !hidden.has(base.name)) traces.unshift(reference(base.top1, base.accuracy));
  const values = traces.flatMap(t => t.y).filter(v => v !== null);
  if (!values.length) {
    Plotly.react("accuracy", [], layout({ visible: false }, { annotations: [{ xref: "paper",
      yref: "paper", x: 0.5, y: 0.5, showarrow: false,
      text: "not measured: the data have no labels" }] }), config);
    return;
  }
  const low = Math.min(...values), high = Math.max(...values);
  const room = Math.max(0.08 * (high - low), 0.004);
  const range = [Math.max(0, low - room), high + room];
  const extra = {};
  if (base && base.top1 > 0) {
    extra.yaxis2 = axis({ overlaying: "y", side: "right", showgrid: false,
      tickmode: "auto", tickformat: ".0%",
      range: range.map(v => v / base.top1), title: { text: "of all experts' accuracy" } });
    // An axis is drawn only where a trace uses it.
    traces.push({ x: shown.ks, y: shown.ks.map(() => null), yaxis: "y2", hoverinfo: "skip" });
  }
  Plotly.react("accuracy", traces, layout({ title: { text: "top-1 accuracy" },
    tickformat: ".0%", range }, extra), config);
}

function render() {
  controls();
  document.getElementById("summary").textContent = shown.summary;
  document.getElementById("caveat").textContent = shown.caveat;
  document.getElementById("tiles").innerHTML = shown.tiles;
  legend();
  latency();
  accuracy();
}

document.getElementById("log").onchange = latency;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
if (panels.length) render();
"""
