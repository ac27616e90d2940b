"use strict";
// Draws results.json: one state (the controls, also in the address), one render.
const byId = id => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
// Python says what rows are called, claim and are exported by; the rest is read from the rows.
const rows = data.results.rows.map((row, index) => ({ ...row, ...data.rows[index], index,
  kept: row.accuracy?.retention ?? row.perplexity?.retention ?? null,
  keptRange: row.accuracy?.retention_interval ?? row.perplexity?.retention_interval ?? null,
  ms: row.latency_ms?.median ?? null, untouched: row.engine === "pytorch-eager" }));
const PARTS = { router: "router", dispatch: "dispatch", experts: "experts", combine: "combine",
  host: "rest of the network", runtime: "between nodes" };
const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x",
  "pentagon", "hexagon", "star-diamond"];
const GLYPHS = ["M2 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M2.5 2.5h7v7h-7z", "M6 2l4.5 8h-9z",
  "M6 1.5l4.5 4.5L6 10.5 1.5 6z", "M6 10l4.5-8h-9z", "M4.5 2h3v2.5H10v3H7.5V10h-3V7.5H2v-3h2.5z",
  "M2 3.5l1.5-1.5L6 4.5 8.5 2 10 3.5 7.5 6 10 8.5 8.5 10 6 7.5 3.5 10 2 8.5 4.5 6z",
  "M6 1.5l4.5 3.3-1.7 5.2H3.2L1.5 4.8z", "M3.5 2h5L11 6l-2.5 4h-5L1 6z", "M6 1l1.5 3.5L11 6 7.5 7.5 6 11 4.5 7.5 1 6l3.5-1.5z"];
const FILTERS = { engine: "engine_name", precision: "precision", lowering: "lowering" };
const DIGITS = { accuracy: 1, latency: 3 };

const unique = values => [...new Set(values)];
const least = (list, of) => list.reduce((a, b) => (of(b) < of(a) ? b : a));
const shown = value => value >= 100 ? value.toFixed(0) : value.toPrecision(3);
const percent = share => (100 * share).toFixed(1).replace(/\.0$/, "") + "%";
// Two ends of an interval: with more digits where it is narrow.
const between = ({ low, high }) => percent(low) !== percent(high) ? `${percent(low)} to ${percent(high)}`
  : `${(100 * low).toFixed(2)}% to ${(100 * high).toFixed(2)}%`;
const number = value => value.toLocaleString("en", { maximumFractionDigits: 0 });
// Plotly reads a little HTML in its texts; names out of files are no HTML.
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tint = row => colour("--" + row.precision) || colour("--accent");
const style = row => row.engine_name + (row.lowering ? ", " + row.lowering : "");
const styles = unique(rows.filter(row => !row.untouched).map(style));
const symbol = row => SYMBOLS[styles.indexOf(style(row)) % SYMBOLS.length];

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// State: what the address holds is what the page shows.
const defaults = { model: "", batch: "", phase: "", engine: "", precision: "", lowering: "", goal: "accuracy",
  at: "", log: "", all: "", row: "", sort: "", search: "", more: "" };
let state = { ...defaults };

function restore() {
  state = { ...defaults };
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (key in defaults) state[key] = value;
  }
  const models = unique(rows.map(row => row.model));
  if (!models.includes(state.model)) state.model = models[0] ?? "";
  if (!(state.goal in DIGITS)) state.goal = "accuracy";
}

function change(changes) {
  state = { ...state, ...changes };
  const kept = Object.entries(state).filter(([key, value]) => value !== defaults[key]);
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
  render();
}

// What is shown.
const sized = () => rows.filter(row => row.model === state.model);
const fits = row => row.untouched
  || Object.entries(FILTERS).every(([key, field]) => !state[key] || (row[field] ?? "") === state[key]);
const inPhase = row => (row.phase ?? "") === state.phase;
const within = () => sized().filter(row => String(row.batch) === state.batch && inPhase(row) && fits(row));
const timed = () => within().filter(row => row.ms !== null);
const candidates = () => timed().filter(row => !row.untouched);
const references = () => timed().filter(row => row.untouched);
const judged = () => candidates().some(row => row.kept !== null);
const goal = () => judged() ? state.goal : "latency";

function threshold() {
  const at = Number(state.at);
  if (state.at !== "" && at >= 0) return at;
  return goal() === "accuracy" ? 100 * data.keep : Infinity;
}

function answer() {
  const list = candidates();
  if (!list.length) return { row: null, text: "Nothing could be measured within these filters." };
  // What a search was asked is answered by it, until something else is asked.
  const found = list.find(row => row.index === rows.length - 1);
  if (data.search && found && state.at === "" && goal() === state.goal) return { row: found, text: data.search.answer };
  const at = threshold(), known = list.filter(row => row.kept !== null);
  const fastest = some => least(some, row => row.ms);
  const best = some => { // Most kept, then fastest; without labels the largest k.
    const value = row => known.length ? row.kept ?? -1 : row.k;
    const most = Math.max(...some.map(value));
    return fastest(some.filter(row => value(row) === most));
  };
  const deploy = (some, row, text) => ({ row, text: noVerdict(row, some) ?? text });
  if (goal() === "latency") {
    const fit = list.filter(row => row.ms <= at);
    const row = !fit.length || at === Infinity && !known.length ? fastest(list) : best(fit);
    if (!fit.length) {
      return deploy([row], row, `Nothing here takes ${at} ms or less. Nearest: ${row.claim}, in ${shown(row.ms)} ms.`);
    }
    if (known.length) return deploy([row], row, `Deploy ${row.claim}.`);
    const which = at === Infinity ? "Fastest" : `Most experts within ${at} ms`;
    return deploy(fit, row, `${row.unknown}. ${which}: ${row.claim}.`);
  }
  const proven = known.filter(row => row.shown >= at / 100 - 1e-9), likely = known.filter(row => enough(row));
  if (proven.length) return deploy(proven, fastest(proven), `Deploy ${fastest(proven).claim}.`);
  if (likely.length) return deploy(likely, fastest(likely), `${fastest(likely).claim}. ${unproven(fastest(likely))}.`);
  const row = best(known);
  return deploy([row], row, `Nothing here keeps ${percent(at / 100)}. Nearest: ${row.claim}.`);
}

const enough = row => row.kept >= threshold() / 100 - 1e-9;

// What is said instead of an answer where rounds of the row, its base or a faster other disagree.
function noVerdict(row, others) {
  const faster = others.filter(each => Math.min(...each.latency_ms.rounds) < row.ms);
  const most = Math.max(...[row, rows[row.base], ...faster].map(each => each?.spread ?? 0));
  return most > data.disagree ? `No verdict: times disagree by ${(100 * most).toFixed(0)}%. Close other programs, or run again.` : null;
}

function unproven(row) {
  const keep = threshold() / 100, [seen, unit] = row.samples;
  if (row.kept === null || row.shown === null || row.shown >= keep - 1e-9) return "";
  if (row.kept <= keep || !seen) return `Not proven: more ${unit} needed`;
  const more = Math.max(1, Math.ceil(seen * ((row.kept - row.shown) / (row.kept - keep)) ** 2) - seen);
  const step = 10 ** Math.max(0, String(more).length - 2);
  return `Not proven: about ${number(step * Math.ceil(more / step))} more ${unit} needed`;
}

// What is faster and not proven, or what fewer experts would do.
function caveat(row) {
  const others = candidates().filter(each => each !== row && each.kept !== null);
  if (data.search && answer().text === data.search.answer) return data.search.told;
  if (row.kept === null || goal() !== "accuracy") return "";
  const shownEnough = each => each.shown >= threshold() / 100 - 1e-9;
  if (answer().text.startsWith("No verdict")) {
    const fit = [row, ...others].filter(shownEnough);
    if (!fit.length) return "";
    const fewest = least(fit, each => each.k);
    return `By accuracy alone, k = ${fewest.k} of ${fewest.experts} is enough: ${fewest.keeps}.`;
  }
  const faster = others.filter(each => each.ms < row.ms && enough(each) && unproven(each));
  if (faster.length && !unproven(row)) {
    const next = least(faster, each => each.ms);
    return `Faster: ${next.claim}. ${unproven(next)}.`;
  }
  const fewer = others.filter(each => each.k < row.k);
  if (row.k < row.full_k || !fewer.length) return "";
  const next = Math.max(...fewer.map(each => each.k));
  const claim = least(fewer.filter(each => each.k === next), each => each.ms).claim;
  return fewer.some(enough) ? `Fewer experts are not faster here: ${claim}.`
    : `No smaller k keeps ${percent(threshold() / 100)}. The next: ${claim}.`;
}

// A slowest call that takes so many times the median one tells of the machine, not of the row.
const FAR = 10;
const far = row => row.latency_ms && row.latency_ms.p99 > FAR * row.ms;

function detail(row) {
  const base = rows[row.base];
  let text = `${row.name}, ${row.sizes}: ${shown(row.ms)} ms`;
  if (base && base.ms !== null && base !== row) text += ` against ${shown(base.ms)} ms in PyTorch`;
  return text + ".";
}

// The decision: the fastest row of each k, and the untouched model; what is the same in all is said once.
const bytes = value => value >= 1e9 ? (value / 1e9).toFixed(2) + " GB" : value >= 1e6 ? (value / 1e6).toFixed(1) + " MB"
  : (value / 1e3).toFixed(1) + " kB";
const within95 = (value, range, text) => range ? [text(value), `${text(range.low)} to ${text(range.high)}`] : text(value);
const CHOICES = [
  ["Accuracy", row => row.accuracy?.top1 ?? null, (value, row) => within95(value, row.accuracy.top1_interval, percent)],
  ["Perplexity", row => row.perplexity?.value ?? null,
    (value, row) => within95(value, row.perplexity.interval, each => each.toPrecision(4))],
  ["Kept", row => row.kept, (value, row) => row.shown === null || row.shown === value ? percent(value)
    : [percent(value), `at least ${percent(Math.floor(1e3 * row.shown + 1e-9) / 1e3)}`]],
  ["Median ms", row => row.ms, shown], ["p99 ms", row => row.latency_ms.p99, shown],
  ["Tokens/s", row => row.tokens_per_s, value => number(value)],
  ["Inputs/s", row => row.tokens_per_s === null ? row.throughput : null, value => number(value)],
  ["vs all experts", row => row.gain, (value, row) => rows[row.base] === row ? "" : speed(value)],
  ["vs PyTorch", row => row.speed, (value, row) => rows[row.base] === row ? "" : (row.told ? "" : "≈ ") + speed(value)],
  ["On disk", row => row.disk_bytes, bytes], ["Memory", row => row.peak_memory_mb, value => number(value) + " MB"],
  ["Runs in", row => row.name, (_, row) => row.untouched ? "PyTorch" : [row.engine_name,
    row.name.replace(row.engine_name, "").replace(/^, /, "")], "text"],
];

function decision(chosen) {
  byId("decision-card").hidden = !timed().length;
  const list = candidates(), ks = unique(list.map(row => row.k)).sort((a, b) => b - a);
  const own = ks.map(k => chosen?.k === k ? chosen : least(list.filter(row => row.k === k), row => row.ms));
  const all = [...references(), ...own];
  const told = CHOICES.filter(([, value]) => own.some(row => value(row) !== null));
  const same = own.length > 1 ? told.filter(([, value]) => own.every(row => value(row) === value(own[0]))) : [];
  const columns = told.filter(each => !same.includes(each));
  const head = ["k", ...columns.map(([name]) => name)].map((name, i) =>
    element("th", { scope: "col", textContent: name, className: columns[i - 1]?.[3] ?? "" }));
  const body = all.map(row => {
    const label = row.untouched ? "PyTorch" : `${row.k} of ${row.experts}`;
    const pick = row.untouched ? label : element("button", { type: "button", className: "pick", textContent: label,
      title: "choose this row", ariaPressed: String(row === chosen), onclick: () => change({ row: String(row.index) }) });
    return element("tr", { className: row === chosen ? "chosen" : row.untouched ? "reference" : "" },
      element("th", { scope: "row" }, pick), ...columns.map(([name, value, text, kind]) => {
        const found = value(row), bad = name === "p99 ms" && far(row);
        const [main, small] = [found === null ? "–" : text(found, row)].flat();
        return element("td", { className: `${kind ?? ""} ${bad ? "bad" : found === null ? "quiet" : ""}` }, main,
          ...small ? [element("small", { textContent: small })] : []);
      }));
  });
  byId("decision").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
  const notes = same.map(([name, value, text]) => `${name.toLowerCase()} ${
    [text(value(own[0]), own[0])].flat().filter(Boolean).join(", ")}`);
  const slow = all.filter(far).map(row => `${shown(row.ms)} ms, p99 ${shown(row.latency_ms.p99)} ms (${
    row.untouched ? "PyTorch" : "k = " + row.k})`);
  byId("decision-same").textContent = notes.length ? `The same for every k: ${notes.join("; ")}.` : "";
  byId("decision-far").textContent = slow.length ? `Some calls took more than ${FAR} times the median: ${slow.join("; ")}. `
    + "Other programs ran, or threads waited for each other: run again, or give fewer --threads." : "";
}

const speed = ratio => ratio.toFixed(ratio >= 20 ? 0 : ratio >= 1 ? 1 : 2) + "×";

// Charts.
const config = { displayModeBar: false };
const width = host => document.documentElement.classList.contains("print") ? 690 : host.clientWidth;

function axis(extra) {
  if (extra.title) extra.title.standoff = 10;
  return { gridcolor: colour("--faint"), linecolor: colour("--faint"), zeroline: false,
    fixedrange: true, ...extra };
}

function draw(id, traces, layout, label) {
  const host = byId(id);
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", label);
  Plotly.react(id, traces, { showlegend: false, margin: { l: 72, r: 14, t: 12, b: 46 },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "closest",
    font: { color: colour("--soft"), size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--faint"), align: "left",
      namelength: 0, font: { color: colour("--ink"), size: 12 } },
    width: width(host), height: host.clientHeight, ...layout }, config);
  if (!host.picks) {
    host.on("plotly_click", event => {
      const index = event.points[0]?.customdata;
      if (index !== undefined && !rows[index].untouched) change({ row: String(index) });
    });
    host.picks = true;
  }
}

function told(row) {
  const lines = [`<b>${plain(row.name)}</b>`, `k = ${row.k} of ${row.experts}, ${row.sizes}`,
    `${shown(row.ms)} ms` + (row.speed === null ? "" : `, ${speed(row.speed)}`)];
  if (row.kept !== null) lines.push(`${percent(row.kept)} kept`);
  if (row.tokens_per_s !== null) lines.push(`${number(row.tokens_per_s)} tokens/s`);
  if (row.same !== null) lines.push(`same experts: ${percent(row.same)}`);
  return lines.join("<br>");
}

const marks = (list, extra) => ({ text: list.map(told), customdata: list.map(row => row.index),
  hovertemplate: "%{text}<extra></extra>", ...extra });
const ring = (x, y, extra) => ({ x: [x], y: [y], mode: "markers", hoverinfo: "skip", name: "answer",
  cliponaxis: false, marker: { symbol: "circle-open", size: 20, color: colour("--ink"),
    line: { width: 2.5 } }, ...extra });

// 1, 2, 5, 10, …: ticks of a logarithmic axis that read as numbers.
function steps(low, high) {
  const tickvals = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const digit of high - low > 2.5 ? [1] : [1, 2, 5]) {
      const at = Math.log10(digit) + power;
      if (at >= low && at <= high) tickvals.push(digit * 10 ** power);
    }
  }
  return { tickvals, ticktext: tickvals.map(value => String(Number(value.toPrecision(1)))) };
}

// The threshold as a share that a chart shows; one far below all rows would flatten them.
const shownThreshold = () => goal() === "accuracy" && threshold() >= 50 ? threshold() / 100 : 1;
// An axis of shares whose ticks differ as written.
const shares = range => ({ range, tickformat: range[1] - range[0] < 0.045 ? ".1%" : ".0%" });

// What can be deployed: rows that keep about what is asked, and faster ones that come near.
const NEAR = 0.05;
function zoomed(known, chosen) {
  const own = known.filter(row => !row.engine.startsWith("pytorch"));
  const near = own.filter(row => row.kept >= shownThreshold() - NEAR || row === chosen);
  const most = Math.max(...near.map(row => row.ms));
  const others = known.filter(row => !own.includes(row) && row.ms <= 1.5 * most && row.kept >= shownThreshold() - NEAR);
  return near.length ? [...near, ...others] : known;
}

const bars = (above, below, extra) => ({ type: "data", symmetric: false, thickness: 1.2, width: 3,
  array: above.map(v => Math.max(0, v)), arrayminus: below.map(v => Math.max(0, v)), ...extra });

function deploy(chosen) {
  const judged = timed().filter(row => row.kept !== null);
  byId("deploy-figure").hidden = !judged.length;
  if (!judged.length) return;
  const known = zoomed(judged, chosen), away = judged.filter(row => !known.includes(row));
  byId("keep-option").textContent = `${quality()} kept, at least`;
  byId("deploy-title").textContent = `What can be deployed: ${quality()} over latency`;
  byId("deploy-away").textContent = away.length ? `Outside of the chart: ${away.sort((a, b) => a.ms - b.ms).map(row =>
    `${row.untouched ? "PyTorch" : at(row)} (${shown(row.ms)} ms, ${percent(row.kept)})`).join("; ")}.` : "";
  const frontOf = list => {
    const found = [];
    for (const row of [...list].sort((a, b) => a.ms - b.ms || b.kept - a.kept)) {
      if (!found.length || row.kept > found.at(-1).kept) found.push(row);
    }
    return found;
  };
  const front = frontOf(known);
  const runs = data.runs.map((run, i) => ({ ...run, ink: RUN_INKS[i % RUN_INKS.length], rows: run.rows.filter(row =>
    String(row.batch) === state.batch && row.phase === state.phase && row.kept >= shownThreshold() - NEAR
    && (row.model === state.model || !run.rows.some(each => each.model === state.model))
    && !row.name.startsWith("PyTorch")) }));
  const beside = runs.flatMap(run => run.rows);
  // The axes hold the points, and the bars but for outliers.
  const left = row => Math.max(0.6 * row.ms, Math.min(...row.latency_ms.rounds));
  const right = row => Math.min(1.6 * row.ms, Math.max(...row.latency_ms.rounds));
  const low = row => Math.max(row.keptRange?.low ?? row.kept, row.kept - 2 * NEAR);
  const high = row => Math.min(row.keptRange?.high ?? row.kept, row.kept + 2 * NEAR);
  const logs = [...known.flatMap(row => [left(row), right(row)]), ...beside.map(row => row.ms)].map(Math.log10);
  const side = 0.06 * Math.max(0.4, Math.max(...logs) - Math.min(...logs));
  const x = [Math.min(...logs) - side, Math.max(...logs) + side];
  const kept = [...known.flatMap(row => [low(row), high(row)]), ...beside.map(row => row.kept), shownThreshold()];
  const room = 0.07 * Math.max(0.02, Math.max(...kept) - Math.min(...kept));
  const y = [Math.max(-0.02, Math.min(...kept) - room), Math.max(...kept) + room];
  const line = (list, extra) => ({ x: list.map(row => row.ms), y: list.map(row => row.kept), mode: "lines", hoverinfo: "skip",
    ...extra });
  const traces = [line(front, { name: "front", line: { color: colour("--soft"), width: 1.5, shape: "hv" } })];
  for (const name of unique(known.map(row => row.name))) {
    const group = known.filter(row => row.name === name);
    const on = row => front.includes(row);
    const mark = row => row.untouched ? "star" : symbol(row) + (on(row) ? "" : "-open");
    const color = group[0].untouched ? colour("--reference") : tint(group[0]);
    traces.push(marks(group, { x: group.map(row => row.ms), y: group.map(row => row.kept), name, mode: "markers",
      marker: { color, size: group.map(row => row.untouched ? 13 : on(row) ? 10 : 8), symbol: group.map(mark),
        line: { width: group.map(row => on(row) ? 0 : 1.5) } },
      error_x: bars(group.map(row => right(row) - row.ms), group.map(row => row.ms - left(row)), { color }),
      error_y: bars(group.map(row => high(row) - row.kept), group.map(row => row.kept - low(row)), { color }) }));
  }
  for (const run of runs.filter(each => each.rows.length)) {
    const color = colour(run.ink);
    traces.push(line(frontOf(run.rows), { name: run.name, line: { color, width: 1.5, shape: "hv", dash: "dot" } }),
      { ...line(run.rows), mode: "markers", name: run.name, marker: { color, size: 9, symbol: "x-thin", line: { width: 2, color } },
        hoverinfo: undefined, hovertemplate: "%{text}<extra></extra>", text: run.rows.map(row => `<b>${plain(run.name)}</b><br>${
          plain(row.name)}<br>${shown(row.ms)} ms, ${percent(row.kept)} kept`) });
  }
  if (chosen && chosen.kept !== null) traces.push(ring(chosen.ms, chosen.kept));
  const bound = { type: "line", line: { color: colour("--accent"), width: 1.2, dash: "dash" } };
  const at_ = threshold();
  const shapes = goal() === "accuracy"
    ? [{ ...bound, xref: "paper", x0: 0, x1: 1, y0: at_ / 100, y1: at_ / 100 }]
    : at_ > 0 && at_ < Infinity ? [{ ...bound, yref: "paper", y0: 0, y1: 1, x0: at_, x1: at_ }] : [];
  draw("deploy", traces, { shapes, annotations: labels("deploy", known, front, x, y),
    xaxis: axis({ type: "log", range: x, title: { text: "median latency, ms (log)" }, ...steps(...x) }),
    yaxis: axis({ ...shares(y), title: { text: `${quality()} kept` } }) },
  `Accuracy over latency of ${known.length} rows; on the front: ` + front.map(row =>
    `${row.untouched ? "PyTorch" : "k = " + row.k} ${shown(row.ms)} ms ${percent(row.kept)}`).join("; "));
}

const RUN_INKS = ["--bf16", "--fp8", "--int4", "--dispatch"];

// k at the points: a label goes where it hides neither a mark nor another label, or away.
function labels(id, known, front, x, y) {
  const wide = width(byId(id)) - 86, height = byId(id).clientHeight - 58;
  const place = row => [wide * (Math.log10(row.ms) - x[0]) / (x[1] - x[0]),
    height * (y[1] - row.kept) / (y[1] - y[0])];
  const taken = known.map(row => place(row)).map(([px, py]) => [px - 6, py - 6, px + 6, py + 6]);
  const found = [];
  const order = [...front, ...known.filter(row => row.untouched || !front.includes(row))];
  for (const row of unique(order)) {
    const text = row.untouched ? "PyTorch" + (row.on_gpu ? ", GPU" : "") : String(row.k);
    const half = 3.7 * text.length + 2, [px, py] = place(row);
    // Beside the bars, not on them.
    for (const [dx, dy] of [[half + 7, -12], [-half - 7, -12], [half + 7, 12], [-half - 7, 12]]) {
      const box = [px + dx - half, py + dy - 8, px + dx + half, py + dy + 8];
      if (box[0] < 0 || box[1] < 0 || box[2] > wide || box[3] > height) continue;
      if (taken.some(b => b[0] < box[2] && box[0] < b[2] && b[1] < box[3] && box[1] < b[3])) continue;
      taken.push(box);
      found.push({ x: Math.log10(row.ms), y: row.kept, text, showarrow: false, xshift: dx, yshift: -dy,
        font: { size: 12, color: colour(front.includes(row) ? "--ink" : "--soft") } });
      break;
    }
  }
  return found;
}

// Latencies that are far apart are drawn by factors, unless the reader says otherwise.
function logarithmic() {
  const all = timed().map(row => row.ms);
  return state.log ? state.log === "1" : Math.max(...all) > 6 * Math.min(...all);
}

// Where the latency axis ends: above every median, and every bar that is no outlier.
function topOf(list) {
  const highest = Math.max(...list.map(row => row.ms));
  return 1.06 * Math.max(highest, Math.min(1.5 * highest,
    Math.max(...list.map(row => Math.max(...row.latency_ms.rounds)))));
}

// An engine's rows by k: one line where every k has one lowering, else a line for each.
function series(list) {
  return unique(list.map(row => row.engine_name + row.precision)).flatMap(key => {
    const here = list.filter(row => row.engine_name + row.precision === key).sort((a, b) => a.k - b.k);
    return unique(here.map(row => row.k)).length === here.length ? [here]
      : unique(here.map(row => row.name)).map(name => here.filter(row => row.name === name));
  });
}

const quality = () => rows.some(row => row.perplexity) ? "perplexity" : "accuracy";

// Lines with the same values stand beside one another: those over k by a part of the axis' margin.
const aside = (k, pad, index) => k * 2 ** (0.4 * pad * index);

function overK(chosen) {
  const list = candidates(), all = timed();
  byId("overk-figure").hidden = !list.length;
  if (!list.length) return;
  const ks = unique(list.map(row => row.k)).sort((a, b) => a - b);
  const both = all.some(row => row.kept !== null), log = logarithmic();
  byId("overk-title").textContent = "Latency" + (both ? ` and ${quality()}` : "") + " by k";
  byId("overk").classList.toggle("double", both);
  const pad = 0.04 * Math.max(1, Math.log2(ks.at(-1) / ks[0]));
  const x = [Math.log10(ks[0]) - pad, Math.log10(ks.at(-1)) + pad], ends = x.map(v => 10 ** v);
  const top = log ? Infinity : topOf(all), dash = colour("--reference");
  const named = series(list), lines = [];
  const traces = [];
  const across = (value, row, yaxis) => traces.push({ x: ends, y: [value, value], yaxis, mode: "lines",
    name: row.name, text: [told(row), told(row)], hovertemplate: "%{text}<extra></extra>",
    line: { color: dash, width: 1.8, dash: "dash" } });
  for (const row of references()) {
    const rounds = row.latency_ms.rounds;
    const edge = (value, extra) => ({ x: ends, y: [value, value], mode: "lines", line: { width: 0 },
      hoverinfo: "skip", ...extra });
    traces.push(edge(Math.min(...rounds)), edge(Math.min(Math.max(...rounds), top),
      { fill: "tonexty", fillcolor: colour("--band") }));
    across(row.ms, row, "y");
    if (both && row.kept !== null) across(row.kept, row, "y2");
  }
  for (const precision of unique(all.map(row => row.precision))) {
    const limits = new Map(all.filter(row => row.precision === precision && row.limit_ms)
      .map(row => [row.k, row.limit_ms]).sort((a, b) => a[0] - b[0]));
    if (limits.size > 1) traces.push({ x: [...limits.keys()], y: [...limits.values()], mode: "lines",
      text: [...limits.values()].map(ms => `limit of the machine, ${plain(precision)}: ${shown(ms)} ms`),
      hovertemplate: "%{text}<extra></extra>", line: { color: tint({ precision }), width: 1.2, dash: "dot" } });
  }
  for (const group of named) {
    const look = { color: tint(group[0]), dash: group[0].engine.startsWith("pytorch") ? "dot" : "solid", width: 1.8 };
    const high = group.map(row => Math.max(...row.latency_ms.rounds));
    traces.push(marks(group, { x: group.map(row => row.k), y: group.map(row => row.ms), name: group[0].name,
      mode: "lines+markers", line: look, marker: { color: look.color, symbol: group.map(symbol), size: 7 },
      error_y: bars(group.map((row, i) => Math.min(high[i], top) - row.ms),
        group.map(row => row.ms - Math.min(...row.latency_ms.rounds))) }));
    const cut = group.filter((row, i) => high[i] > top);
    if (cut.length) traces.push({ x: cut.map(row => row.k), y: cut.map(() => 0.965 * top), mode: "markers",
      hoverinfo: "skip", name: "cut", marker: { symbol: "triangle-up", size: 8, color: look.color } });
  }
  if (both) {
    // A line whose points another of its precision has is not drawn: its marks would hide each other.
    const value = row => `${row.precision} ${row.k} ${row.kept.toFixed(6)}`;
    for (const group of named.map(each => each.filter(row => row.kept !== null))
      .sort((a, b) => b.length - a.length)) {
      const held = lines.some(each => group.every(row => each.map(value).includes(value(row))));
      if (!held && group.length) lines.push(group);
    }
    // Precisions mostly agree: beside one another all can be seen.
    lines.forEach((group, index) => traces.push(marks(group, { yaxis: "y2",
      x: group.map(row => aside(row.k, pad, index)), y: group.map(row => row.kept), name: group[0].name,
      mode: "lines+markers", line: { color: tint(group[0]), width: 1.8 },
      marker: { color: tint(group[0]), symbol: group.map(symbol), size: 7 },
      error_y: bars(group.map(row => (row.keptRange?.high ?? row.kept) - row.kept),
        group.map(row => row.kept - (row.keptRange?.low ?? row.kept))) })));
  }
  if (chosen) {
    traces.push(ring(chosen.k, chosen.ms));
    const place = lines.findIndex(each => each.some(row => ["precision", "k", "kept"].every(one => row[one] === chosen[one])));
    if (both && chosen.kept !== null) traces.push(ring(aside(chosen.k, pad, Math.max(0, place)), chosen.kept, { yaxis: "y2" }));
  }
  const kept = all.filter(row => row.kept !== null);
  const low = Math.min(shownThreshold(), ...kept.map(row => Math.min(row.kept, row.keptRange?.low ?? 1)));
  const high = Math.max(1, ...kept.map(row => Math.max(row.kept, row.keptRange?.high ?? 0)));
  const room = 0.08 * Math.max(0.02, high - low);
  const yaxis = axis({ title: { text: "median latency, ms" }, domain: both ? [0.54, 1] : [0, 1] });
  if (log) {
    const logs = all.map(row => Math.log10(row.ms)), y = [Math.min(...logs) - 0.1, Math.max(...logs) + 0.15];
    Object.assign(yaxis, { type: "log", range: y, ...steps(...y) });
  } else yaxis.range = [0, top];
  const shapes = !both || goal() !== "accuracy" ? [] : [{ type: "line", yref: "y2", xref: "paper", x0: 0, x1: 1,
    y0: threshold() / 100, y1: threshold() / 100, line: { color: colour("--accent"), width: 1.2, dash: "dash" } }];
  draw("overk", traces, { shapes, yaxis, ...both && { yaxis2: axis({ domain: [0, 0.46],
    ...shares([Math.max(-0.02, low - room), high + room]), title: { text: `${quality()} kept` } }) },
    xaxis: axis({ type: "log", range: x, tickvals: ks, ticktext: ks.map(String), anchor: both ? "y2" : "y",
      showgrid: true, title: { text: `experts computed, k of ${list[0].experts}` } }) },
  "Latency" + (both ? ` and ${quality()}` : "") + ` for k = ${ks.join(", ")}; the table below holds the numbers`);
}

function throughput(chosen) {
  const batches = unique(sized().map(row => row.batch)).sort((a, b) => a - b);
  const figure = byId("throughput-figure");
  figure.hidden = batches.length < 2 || !chosen;
  figure.parentElement.classList.toggle("single", figure.hidden);
  if (figure.hidden) return;
  const rate = row => row.tokens_per_s ?? row.throughput ?? 1000 * row.batch / row.ms;
  const unit = chosen.tokens_per_s === null ? "inputs/s" : "tokens/s";
  const usable = sized().filter(row => row.ms !== null && inPhase(row) && fits(row));
  const lines = [[`k = ${chosen.k}`, row => row.k === chosen.k, tint(chosen), "solid"],
    [chosen.full_k < chosen.experts ? "as trained" : "all experts",
      row => row.k === row.full_k && chosen.k < row.full_k, tint(chosen), "dot"]]
    .map(([name, wanted, ...look]) => [name, usable.filter(row => wanted(row)
      && row.engine_name === chosen.engine_name && row.precision === chosen.precision), ...look]);
  lines.push(["PyTorch", usable.filter(row => row.untouched && row.on_gpu === (rows[chosen.base]?.on_gpu ?? false)),
    colour("--reference"), "dash"]);
  const traces = [];
  for (const [name, list, color, dash] of lines) {
    const best = batches.map(batch => list.filter(row => row.batch === batch))
      .filter(here => here.length).map(here => least(here, row => -rate(row)));
    if (best.length) traces.push(marks(best, { x: best.map(row => row.batch), y: best.map(rate), name,
      mode: "lines+markers+text", line: { color, dash, width: 1.8 }, marker: { color, size: 7 },
      text: best.map(row => told(row) + `<br>${number(rate(row))} ${unit}`),
      textfont: { color, size: 12 }, hovertemplate: "%{text}<extra></extra>" }));
  }
  // Names stand at the end where the lines are further apart.
  const apart = place => {
    const ends = traces.map(trace => Math.log(trace.y.at(place))).sort((a, b) => a - b);
    return Math.min(...ends.slice(1).map((value, i) => value - ends[i]));
  };
  const end = apart(0) > apart(-1) ? 0 : -1;
  for (const trace of traces) {
    const last = (trace.y.length + end) % trace.y.length;
    trace.texttemplate = trace.y.map((_, i) => i === last ? `\u2002${trace.name}\u2002` : "");
    const rises = trace.y.at(-1) > trace.y[0];  // the name is beside its line, not on it
    trace.textposition = end ? (rises ? "top left" : "bottom left") : (rises ? "bottom right" : "top right");
  }
  traces.push(ring(chosen.batch, rate(chosen)));
  const logs = traces.flatMap(trace => trace.y).map(Math.log10), y = [Math.min(...logs) - 0.4, Math.max(...logs) + 0.3];
  const ends = [batches[0], batches.at(-1)].map(Math.log10), pad = 0.06 * (ends[1] - ends[0]);
  draw("throughput", traces, {
    xaxis: axis({ type: "log", range: [ends[0] - pad, ends[1] + pad], tickvals: batches,
      ticktext: batches.map(String), title: { text: "batch" } }),
    yaxis: axis({ type: "log", range: y, ...steps(...y), title: { text: `${unit} (log)` } }) },
  "Throughput by batch: " + traces.slice(0, -1).map(trace => `${trace.name}: ${trace.y.map(number).join(", ")}`).join("; "));
}

// How long the calls of the selected row took: bins of equal factors.
function percentiles(chosen) {
  const latency = chosen?.latency_ms, counts = latency?.counts ?? [];
  byId("percentiles-figure").hidden = !counts.length;
  if (!counts.length) return;
  const factor = Math.log(latency.max / latency.min), edge = i => latency.min * Math.exp(factor * i / counts.length);
  const place = ms => counts.length * Math.log(ms / latency.min) / factor - 0.5;
  const stops = [0, 0.25, 0.5, 0.75, 1].map(part => part * counts.length);
  const marks = [["median", latency.median], ["p99", latency.p99]];
  draw("percentiles", [{ type: "bar", x: counts.map((_, i) => i), y: counts, marker: { color: tint(chosen) }, name: "calls",
    text: counts.map((count, i) => `${shown(edge(i))} to ${shown(edge(i + 1))} ms: ${number(count)} calls`), textposition: "none",
    hovertemplate: "%{text}<extra></extra>" }], { bargap: 0.06,
    shapes: marks.map(([, ms]) => ({ type: "line", yref: "paper", x0: place(ms), x1: place(ms), y0: 0, y1: 1,
      line: { color: colour("--ink"), width: 1.2, dash: "dot" } })),
    annotations: marks.map(([name, ms], i) => ({ x: place(ms), yref: "paper", y: 1 - 0.13 * i, text: `${name} ${shown(ms)}`,
      showarrow: false, xanchor: place(ms) > counts.length / 2 ? "right" : "left", xshift: place(ms) > counts.length / 2 ? -4 : 4,
      font: { color: colour("--ink"), size: 12 } })),
    xaxis: axis({ showgrid: false, range: [-0.7, counts.length - 0.3], tickvals: stops.map(at => at - 0.5),
      ticktext: stops.map(at => shown(edge(at))), title: { text: "ms (log)" } }),
    yaxis: axis({ title: { text: `calls of ${number(latency.n)} (log)` }, type: "log",
      range: [-0.15, Math.log10(Math.max(...counts)) + 0.45], ...steps(0, Math.log10(Math.max(...counts))) }) },
  "Latency: " + ["min", "median", "p90", "p95", "p99", "max"].map(each => `${each} ${shown(latency[each])} ms`).join(", "));
}

// Tokens per second in each phase, and perplexity, over k: a line for each engine and precision.
function tokens(chosen) {
  const list = sized().filter(row => String(row.batch) === state.batch && row.tokens_per_s !== null && fits(row));
  byId("tokens-card").hidden = !list.length;
  if (!list.length) return;
  for (const phase of ["decode", "prefill"]) {
    const here = list.filter(row => row.phase === phase);
    const rates = row => row.latency_ms.rounds.map(ms => row.tokens_per_s * row.ms / ms);
    tokensOverK(phase, here, row => row.tokens_per_s, row => [Math.min(...rates(row)), Math.max(...rates(row))],
      "tokens/s", here.find(row => chosen && row.name === chosen.name && row.k === chosen.k));
  }
  // Quality does not depend on the phase. PyTorch's rows have that of the graphs in FP32.
  const judged = list.filter(row => row.perplexity && row.phase === list[0].phase);
  const graphs = judged.filter(row => row.untouched || !row.engine.startsWith("pytorch"));
  tokensOverK("perplexity", graphs.some(row => !row.untouched) ? graphs : judged, row => row.perplexity.value,
    row => row.perplexity.interval ? [row.perplexity.interval.low, row.perplexity.interval.high] : [row.perplexity.value,
      row.perplexity.value], "perplexity", judged.find(row => chosen && row.name === chosen.name && row.k === chosen.k));
}

function tokensOverK(id, list, value, range, title, chosen) {
  byId(`tokens-${id}-figure`).hidden = !list.length;
  if (!list.length) return;
  const ks = unique(list.map(row => row.k)).sort((a, b) => a - b), traces = [];
  const pad = 0.06 * Math.max(1, Math.log2(ks.at(-1) / ks[0]));
  const x = [Math.log10(ks[0]) - pad, Math.log10(ks.at(-1)) + pad];
  const own = list.filter(row => !row.untouched);
  for (const row of list.filter(each => each.untouched)) {
    traces.push({ x: x.map(v => 10 ** v), y: [value(row), value(row)], mode: "lines", name: row.name,
      text: [told(row), told(row)], hovertemplate: "%{text}<extra></extra>",
      line: { color: colour("--reference"), width: 1.8, dash: "dash" } });
  }
  series(own).forEach((group, index) => {
    const color = tint(group[0]), dash = group[0].engine.startsWith("pytorch") ? "dot" : "solid";
    traces.push(marks(group, { x: group.map(row => aside(row.k, pad, index)), y: group.map(value), name: group[0].name,
      mode: "lines+markers", line: { color, dash, width: 1.8 }, marker: { color, symbol: group.map(symbol), size: 7 },
      error_y: bars(group.map(row => range(row)[1] - value(row)), group.map(row => value(row) - range(row)[0])) }));
  });
  const place = series(own).findIndex(group => group.includes(chosen));
  if (chosen) traces.push(ring(aside(chosen.k, pad, Math.max(0, place)), value(chosen)));
  const ends = list.flatMap(range), logs = [Math.log10(Math.min(...ends)), Math.log10(Math.max(...ends))];
  const far = logs[1] - logs[0] > Math.log10(6), room = 0.08 * Math.max(0.02, logs[1] - logs[0]);
  const y = [logs[0] - room, logs[1] + room], span = Math.max(...ends) - Math.min(...ends);
  const low = title === "perplexity" ? Math.min(...ends) - 0.12 * span - 0.01 : 0;
  draw(`tokens-${id}`, traces, {
    xaxis: axis({ type: "log", range: x, tickvals: ks, ticktext: ks.map(String),
      title: { text: `experts for a token, k of ${list[0].experts}` } }),
    yaxis: axis(far ? { type: "log", range: y, ...steps(...y), title: { text: `${title} (log)` } }
      : { range: [low, Math.max(...ends) + 0.12 * span + 0.01], title: { text: title } }) },
  `${title} of ${id} by k: ` + own.map(row => `k = ${row.k} ${row.short} ${shown(value(row))}`).join("; "));
}

function routing() {
  if (data.search) return "";
  const kind = data.results.models.find(model => model.name === state.model)?.kind;
  const list = candidates(), exports = list.filter(row => !row.engine.startsWith("pytorch"));
  const known = list.filter(row => row.routing);
  if (known.length) {
    const worst = least(known, row => row.same), tokens = worst.routing.choices != null;
    return worst.same >= 1
      ? `Routing: every row selected the same experts as PyTorch for every ${tokens ? "token in every layer" : "sample"}.`
      : `Routing: the same experts as PyTorch for ${percent(worst.same)} (k = ${worst.k}, ${worst.short}) `
        + `to ${percent(Math.max(...known.map(row => row.same)))} of ${tokens ? "tokens and layers" : "samples"}.`;
  }
  const why = !list.length ? "nothing was measured" : list.every(row => row.k === row.experts)
    ? "every row here computes all its experts" : !exports.length
      ? "only PyTorch was measured, and there is nothing to compare it with"
      : kind === "mumoe" ? "muMoE layers weigh all experts for every token and choose no set for an input"
        : `${unique(exports.map(row => row.engine_name)).join(" and ")} does not show which experts it chose`;
  return `Routing is not compared: ${why}.`;
}

function stacked(id, names, series, unit, label) {
  byId(id).style.height = Math.max(130, 28 * names.length + 66) + "px";
  const long = Math.min(220, 14 + 6.3 * Math.max(...names.map(name => name.length)));
  draw(id, series.map(({ name, ink, values }) => ({ type: "bar", orientation: "h", y: names.map((_, i) => i),
    x: values, name, marker: { color: colour(ink) }, textposition: "none",
    text: values.map((value, i) => `${plain(names[i])}<br>${name}: ${shown(value)} ${unit.split(" ")[0]}`),
    hovertemplate: "%{text}<extra></extra>" })), { barmode: "stack", bargap: 0.3,
    margin: { l: long, r: 12, t: 8, b: 44 }, xaxis: axis({ title: { text: unit }, rangemode: "tozero" }),
    yaxis: axis({ autorange: "reversed", showgrid: false, tickvals: names.map((_, i) => i),
      ticktext: names.map(name => plain(name.length > 34 ? name.slice(0, 33) + "…" : name)) }) }, label);
}

function key(id, entries) {
  byId(id).replaceChildren(...entries.map(([name, drawn]) => {
    const chip = element("span", { className: "key" });
    chip.innerHTML = drawn; // Ours alone; the name is text.
    chip.append(name);
    return chip;
  }));
}

const box = ink => `<i style="background: var(${ink})"></i>`;
const at = row => `${row.short}, k = ${row.k}`;

function legend() {
  const list = candidates(), named = unique(list.map(style));
  const glyph = name => `<svg width="12" height="12" aria-hidden="true"><path d="${
    GLYPHS[styles.indexOf(name) % GLYPHS.length]}" fill="currentColor"/></svg>`;
  key("legend", [...unique(list.map(row => row.precision)).map(name =>
    [name.toUpperCase(), box(/^\w+$/.test(name) ? "--" + name : "--accent")]),
    ...named.map(name => [name, glyph(name)]),
    ...references().length ? [["PyTorch, untouched", `<svg width="14" height="12" aria-hidden="true"><path d="M0 6h14"
      stroke="var(--reference)" stroke-width="2" stroke-dasharray="4 2.5"/></svg>`]] : [],
    ...data.runs.map((run, i) => [run.name, box(RUN_INKS[i % RUN_INKS.length])])]);
}

function parts(chosen) {
  const all = candidates().filter(row => row.parts.length);
  byId("parts-card").hidden = !all.length;
  if (!all.length) return;
  const inks = Object.keys(PARTS);
  key("parts-key", inks.map(part => [PARTS[part], box("--" + part)]));
  const sum = (row, wanted) => row.parts.filter(wanted).reduce((total, part) => total + part.ms, 0);
  stacked("parts", all.map(at), inks.map(part => ({ name: PARTS[part], ink: "--" + part,
    values: all.map(row => sum(row, p => p.part === part)) })), "ms a call, as profiled", "Time by part, for every graph");
  const row = all.includes(chosen) ? chosen : all[0];
  const layers = unique(row.parts.map(part => part.layer ?? part.part));
  stacked("layers", layers.map(name => PARTS[name] ?? name), inks.map(part => ({ name: PARTS[part], ink: "--" + part,
    values: layers.map(name => sum(row, p => p.part === part && (p.layer ?? p.part) === name)) })),
  "ms a call, as profiled", `Time by layer of ${at(row)}`);
}

function memory() {
  const all = [...references(), ...candidates()].filter(row => row.peak_memory_mb !== null);
  byId("memory-card").hidden = !all.length;
  if (!all.length) return;
  key("memory-key", [["runtime alone", box("--runtime")], ["model and batch", box("--experts")]]);
  const held = all.map(row => row.runtime_memory_mb ?? 0);
  stacked("memory", all.map(row => row.untouched ? row.name : at(row)), [
    { name: "runtime alone", ink: "--runtime", values: held },
    { name: "model and batch", ink: "--experts", values: all.map((row, i) => row.peak_memory_mb - held[i]) },
  ], "MB", "Peak memory of every row");
}

// The table: k and latency first, so that they can stay in view.
const time = (name, field) => [name, row => row.latency_ms?.[field] ?? null, shown, "extra"];
const COLUMNS = [
  ["k", row => row.k, null], ["Median ms", row => row.ms, shown],
  ["Speed", row => row.speed, (value, row) => rows[row.base] === row ? "1×" : (row.told ? "" : "≈ ") + speed(value)],
  ["Kept", row => row.kept, percent], ["Engine", row => row.name, String, "text wrap"],
  ["Phase", row => row.phase, String, "text"], ["Tokens/s", row => row.tokens_per_s, number],
  ["Batch", row => row.batch, String], ["Model", row => row.model, String, "text"],
  ...data.gpu ? [[data.gpu, row => row.device_ms?.median ?? null, shown]] : [],
  ["Top-1", row => row.accuracy?.top1 ?? null, value => (100 * value).toFixed(2) + "%"],
  ["Top-5", row => row.accuracy?.top5 ?? null, value => (100 * value).toFixed(2) + "%", "extra"],
  ["Perplexity", row => row.perplexity?.value ?? null, value => value.toPrecision(4)],
  ["Same experts", row => row.same, percent],
  ["× limit", row => row.ms && row.limit_ms ? row.ms / row.limit_ms : null,
    value => value < 1 ? "limit does not hold" : value.toFixed(value < 10 ? 1 : 0), "wrap"],
  ["Spread", row => row.spread, value => (100 * value).toFixed(0) + "%"],
  time("p90", "p90"), time("p95", "p95"), time("p99", "p99"), time("Min", "min"), time("Max", "max"),
  time("Mean", "mean"), time("Std", "std"), ["Calls", row => row.latency_ms?.n ?? null, number, "extra"],
  ["J per call", row => row.joules, shown, "extra"],
  ["Inputs/s", row => row.throughput, number], ["Memory MB", row => row.peak_memory_mb, number],
].filter(([name, value]) => rows.some(row => value(row) !== null));
// What tells the rows apart that are shown.
const telling = some => COLUMNS.filter(([name, value]) => ["k", "Median ms", "Engine"].includes(name) || some.length < 2
  || unique(some.filter(row => row.error === null).map(value)).length > 1);

function title(name, row) {
  if (name === "Kept" && row.keptRange) return `95%: ${between(row.keptRange)}`;
  if (name === data.gpu && row.device_ms) return `p90 ${shown(row.device_ms.p90)}, p99 ${shown(row.device_ms.p99)}, spread ${
    (100 * row.device_spread).toFixed(0)}%`;
  return name === "× limit" ? row.limit_told : name === "Speed" && !row.told ? "within the spread: no difference" : "";
}

function table(chosen) {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  const some = (state.all ? rows.filter(fits) : within())
    .filter(row => words.every(word => `${row.name} ${row.model} k=${row.k} ${row.error ?? ""}`.toLowerCase().includes(word)));
  const down = state.sort.startsWith("-"), by = COLUMNS.find(([name]) => name === state.sort.replace(/^-/, ""));
  if (by) {
    some.sort((a, b) => {
      const x = by[1](a), y = by[1](b);
      // Rows without the value stay below, whichever way it is sorted.
      if (x === null || y === null) return (x === null) - (y === null);
      return (typeof x === "string" ? x.localeCompare(y) : x - y) * (down ? -1 : 1);
    });
  }
  const columns = telling(some);
  byId("count").textContent = `${some.length} of ${rows.length} rows`;
  const head = columns.map(([name, , , kind]) => {
    const button = element("button", { type: "button", textContent: name,
      onclick: () => change({ sort: state.sort === name ? "-" + name : name }) });
    const cell = element("th", { scope: "col", className: kind ?? "" }, button);
    if (by && by[0] === name) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    return cell;
  });
  const body = some.map(row => {
    const line = element("tr", { className: row === chosen ? "chosen" : row.untouched ? "reference" : "" });
    for (const [name, value, text, kind] of columns) {
      const found = value(row), cell = element("td", { className: kind ?? "", title: title(name, row) });
      if (name === "k") {
        const label = `${row.k}/${row.experts}`;
        cell.append(row.ms === null || row.untouched ? label : element("button", { type: "button", className: "pick",
          textContent: label, ariaPressed: String(row === chosen), title: "choose this row",
          onclick: () => change({ row: String(row.index), model: row.model, batch: String(row.batch) }) }));
      } else if (row.error && name === "Median ms") {
        cell.textContent = "failed";
        cell.className = "bad";
      } else if (row.error && name === columns[2][0]) {
        Object.assign(cell, { textContent: `${row.name}: ${row.error}`, className: "error", colSpan: columns.length - 2 });
        line.append(cell);
        break;
      } else {
        cell.textContent = found === null ? "–" : text(found, row);
        if (found === null || name === "Speed" && !row.told) cell.classList.add("quiet");
      }
      if (found !== null) cell.dataset.v = found;
      line.append(cell);
    }
    return line;
  });
  byId("rows").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

// What does not change with the controls.
function still() {
  byId("disturbed").textContent = data.disturbed;
  byId("environment").replaceChildren(...data.environment.flatMap(([name, value]) =>
    [element("dt", { textContent: name }), element("dd", { textContent: value })]));
  const listed = items => element("ul", {}, ...items.map(item => element("li", { textContent: item })));
  byId("method").replaceChildren(listed(data.method),
    ...data.absent.length ? [element("h3", { textContent: "Not measured" }), listed(data.absent)] : [],
    ...data.again ? [element("h3", { textContent: "Reproduce" }), element("pre", { textContent: data.again })] : []);
  byId("tables").replaceChildren(...data.tables.map(card => element("section", { className: "card", id: card.id },
    element("h2", { textContent: card.title }),
    ...card.intro.map(text => element("p", { className: "note", textContent: text })),
    ...card.tables.flatMap(({ title: name, heads, groups }) => [
      ...name ? [element("h3", { textContent: name })] : [],
      element("div", { className: "scroll", tabIndex: 0 }, element("table", {},
        element("thead", {}, element("tr", {}, ...heads.map((text, i) =>
          element("th", { scope: "col", textContent: text, className: i ? "" : "text" })))),
        ...Object.entries(groups).map(([group, lines]) => element("tbody", {},
          element("tr", {}, element("th", { scope: "rowgroup", colSpan: heads.length, textContent: group })),
          ...lines.map(cells => element("tr", {}, ...cells.map((cell, i) => {
            const [text, kind] = Array.isArray(cell) ? cell : [cell, ""], heat = kind.match(/^heat-(\d)$/)?.[1];
            const made = element("td", { textContent: text, className: `${heat ? "heat" : kind} ${i ? "" : "text"} ${text.length > 60 ? "long" : ""}` });
            if (heat) made.style.setProperty("--heat", heat);
            return made;
          })))))))]),
    ...card.notes.map(text => element("p", { className: "note", textContent: text })))));
}

function fill(id, values, label = String, every = "all") {
  const select = byId(id), options = every ? ["", ...values] : values;
  if (!options.map(String).includes(state[id])) state[id] = every ? "" : String(options[0] ?? "");
  select.replaceChildren(...options.map(value =>
    element("option", { value, textContent: value === "" ? every : label(value), selected: String(value) === state[id] })));
  select.parentElement.hidden = values.length < 2;
}

// The slider goes from the least to the most that any row has: evenly, and in latency by factors.
function range() {
  const list = candidates();
  if (goal() === "accuracy") {
    const low = Math.max(0, Math.floor(100 * Math.min(0.9, ...list.map(row => row.kept ?? 1))));
    return { to: v => Number((low + (101 - low) * v / 1000).toFixed(1)), from: at => 1000 * (at - low) / (101 - low) };
  }
  const times = list.map(row => row.ms), low = Math.log(0.8 * Math.min(...times, 1e9)), high = Math.log(1.25 * Math.max(...times, 1e-9));
  return { to: v => Number(Math.exp(low + (high - low) * v / 1000).toPrecision(3)),
    from: at => at === Infinity ? 1000 : 1000 * (Math.log(at) - low) / (high - low) };
}

function controls() {
  fill("model", unique(rows.map(row => row.model)), String, "");
  fill("batch", unique(sized().map(row => row.batch)).sort((a, b) => a - b), String, "");
  fill("phase", unique(sized().map(row => row.phase ?? "")).filter(Boolean).sort(), String, "");
  for (const [id, field] of Object.entries(FILTERS)) {
    fill(id, unique(sized().filter(row => !row.untouched).map(row => row[field] ?? "")).filter(Boolean));
  }
  byId("goal").options[0].disabled = !judged();
  byId("goal").value = goal();
  byId("unit").textContent = goal() === "accuracy" ? "%" : "ms";
  const value = threshold();
  if (document.activeElement !== byId("at")) byId("at").value = value === Infinity ? "" : value;
  if (document.activeElement !== byId("slider")) byId("slider").value = range().from(value);
  byId("slider").setAttribute("aria-valuetext", `${value === Infinity ? "any" : value} ${byId("unit").textContent}`);
  byId("log").checked = logarithmic();
  byId("all").checked = state.all === "1";
  byId("more").checked = state.more === "1";
  byId("rows").classList.toggle("more", state.more === "1");
  if (document.activeElement !== byId("search")) byId("search").value = state.search;
}

function render() {
  if (typeof Plotly === "undefined") return; // Not unpacked yet.
  controls();
  const found = answer(), picked = candidates().find(row => String(row.index) === state.row);
  const chosen = picked ?? found.row;
  byId("summary").textContent = picked && picked !== found.row ? `Selected: ${picked.claim}.` : found.text;
  byId("caveat").textContent = picked && picked !== found.row ? `Recommended: ${found.text}` : chosen ? caveat(chosen) : "";
  byId("detail").textContent = chosen ? detail(chosen) : "";
  byId("export-card").hidden = !chosen;
  byId("command").textContent = chosen?.command ?? "No export command: this row runs in PyTorch, or its checkpoint has no path.";
  decision(chosen);
  byId("charts").hidden = !timed().length;
  legend();
  byId("routing").textContent = rows.length ? routing() : "";
  const unknown = rows.find(row => row.unknown)?.unknown;
  byId("empty").textContent = unknown && !judged() ? `${unknown}.` : "";
  for (const chart of [deploy, overK, throughput, percentiles, tokens, parts]) chart(chosen);
  for (const chart of CHARTS) chart();
  memory();
  table(chosen);
}

function save(name, type, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const id of ["model", "batch", "phase", "engine", "precision", "lowering"]) {
  byId(id).onchange = event => change({ [id]: event.target.value, row: "" });
}
byId("goal").onchange = event => change({ goal: event.target.value, at: "", row: "" });
byId("at").oninput = event => change({ at: event.target.value, row: "" });
byId("slider").oninput = event => change({ at: String(range().to(Number(event.target.value))), row: "" });
byId("search").oninput = event => change({ search: event.target.value });
byId("log").onchange = event => change({ log: event.target.checked ? "1" : "0" });
byId("all").onchange = event => change({ all: event.target.checked ? "1" : "" });
byId("more").onchange = event => change({ more: event.target.checked ? "1" : "" });
byId("reset").onclick = () => { history.replaceState(null, "", "#"); restore(); render(); };
byId("controls").onsubmit = event => event.preventDefault();
byId("copy").onclick = () => navigator.clipboard?.writeText(byId("command").textContent);
byId("csv").onclick = () => save("results.csv", "text/csv", data.csv);
byId("json").onclick = () => save("results.json", "application/json", JSON.stringify(data.results, null, 1) + "\n");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
let resized = 0;
addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(render); });
addEventListener("hashchange", () => { restore(); render(); });
// Paper is light and as wide as A4, whatever the screen is.
for (const [name, on] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => {
    document.documentElement.classList.toggle("print", on);
    render();
  });
}

// plotly.js is in the page compressed: a third of its size.
async function start() {
  restore();
  still();
  const packed = Uint8Array.from(atob(byId("plotly").textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", { textContent: await new Response(stream).text() }));
  render();
  document.documentElement.dataset.drawnMs = performance.now().toFixed(0);
}

start().catch(error => {
  byId("disturbed").textContent = `The charts cannot be drawn in this browser (${error.message}); `
    + "report.md and report.csv beside this page hold the same rows.";
});
