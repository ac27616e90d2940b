"use strict";
// Draws results.json from one state: the controls, which the address also contains.
const byId = id => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
// Python provides the name, claim and export command of each row; the rest comes from the rows.
const rows = data.results.rows.map((row, index) => ({ ...row, ...data.rows[index], index,
  keptRange: row.accuracy?.retention_interval ?? row.perplexity?.retention_interval
    ?? row.regression?.retention_interval ?? null,
}));
const PARTS = { router: "router", dispatch: "dispatch", experts: "experts", combine: "combine",
  host: "rest of the network", runtime: "between nodes" };
const FILTERS = { engine: "engine_name", precision: "precision", lowering: "lowering" };
const DIGITS = { accuracy: 1, latency: 3 };

const unique = values => [...new Set(values)];
const minBy = (list, value) => list.reduce((a, b) => (value(b) < value(a) ? b : a));
const shown = value => value >= 100 ? value.toFixed(0) : value.toPrecision(3);
const percent = share => (100 * share).toFixed(1).replace(/\.0$/, "") + "%";
// The two ends of an interval, with more digits if it is narrow.
const between = ({ low, high }) => percent(low) !== percent(high) ? `${percent(low)} to ${percent(high)}`
  : `${(100 * low).toFixed(2)}% to ${(100 * high).toFixed(2)}%`;
const speed = ratio => ratio.toFixed(ratio >= 20 ? 0 : ratio >= 1 ? 1 : 2) + "×";
const number = value => value.toLocaleString("en", { maximumFractionDigits: 0 });
const style = row => row.engine_name + (row.lowering ? ", " + row.lowering : "");

function element(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// State: the page shows what the address contains.
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
  // The search's own answer is shown until the reader changes the requirement.
  const found = list.find(row => row.index === rows.length - 1);
  if (data.search && found && state.at === "" && goal() === state.goal) return { row: found, text: data.search.answer };
  const at = threshold(), known = list.filter(row => row.kept !== null);
  const fastest = some => minBy(some, row => row.ms);
  const best = some => { // The most kept, then the fastest; without labels, the largest k.
    const value = row => known.length ? row.kept ?? -1 : row.k;
    const most = Math.max(...some.map(value));
    return fastest(some.filter(row => value(row) === most));
  };
  const deploy = (some, row, text) => ({ row, text: noVerdict(row, some) ?? text });
  if (goal() === "latency") {
    const fit = list.filter(row => row.ms <= at);
    const row = !fit.length || at === Infinity && !known.length ? fastest(list) : best(fit);
    if (!fit.length) {
      return deploy([row], row, `No row takes ${at} ms or less. Closest: ${row.claim}, in ${shown(row.ms)} ms.`);
    }
    if (known.length) return deploy([row], row, `Deploy ${row.claim}.`);
    const which = at === Infinity ? "Fastest" : `Most experts within ${at} ms`;
    return deploy(fit, row, `${row.unknown}. ${which}: ${row.claim}.`);
  }
  const proven = known.filter(row => row.shown >= at / 100 - 1e-9), likely = known.filter(row => enough(row));
  if (proven.length) return deploy(proven, fastest(proven), `Deploy ${fastest(proven).claim}.`);
  if (likely.length) { // Of the rows that seem to keep enough, the one that needs the fewest inputs for a proof.
    const fewest = Math.min(...likely.map(missing)), row = fastest(likely.filter(each => missing(each) === fewest));
    return deploy([row], row, `${row.claim}. ${unproven(row)}.`);
  }
  const row = best(known);
  return deploy([row], row, `No row keeps ${percent(at / 100)}. Closest: ${row.claim}.`);
}

const enough = row => row.kept >= threshold() / 100 - 1e-9;

// Replaces the answer if the rounds of the row, its base or a faster row disagree.
function noVerdict(row, others) {
  if (row.waited) return `No verdict: threads waited for a core ${(100 * row.waited).toFixed(0)}% of their time. Close other programs, or run again.`;
  const faster = others.filter(each => Math.min(...each.latency_ms.rounds) < row.ms);
  const most = Math.max(...[row, rows[row.base], ...faster].map(each => each?.spread ?? 0));
  return most > data.disagree ? `No verdict: times disagree by ${(100 * most).toFixed(0)}%. Close other programs, or run again.` : null;
}

// How many more inputs would prove that a row keeps enough: 0 if it is proven.
function missing(row) {
  const keep = threshold() / 100, [count] = row.samples;
  if (row.kept === null || row.shown === null || row.shown >= keep - 1e-9) return 0;
  return row.kept <= keep || !count ? Infinity
    : Math.max(1, Math.ceil(count * ((row.kept - row.shown) / (row.kept - keep)) ** 2) - count);
}

function unproven(row) {
  const more = missing(row), unit = row.samples[1];
  if (!more) return "";
  if (more === Infinity) return `Not proven: more ${unit} needed`;
  const step = 10 ** Math.max(0, String(more).length - 2);
  return `Not proven: about ${number(step * Math.ceil(more / step))} more ${unit} needed`;
}

// The faster rows that are not proven, or the effect of fewer experts.
function caveat(row) {
  const others = candidates().filter(each => each !== row && each.kept !== null);
  if (data.search && answer().text === data.search.answer) return data.search.told;
  if (row.kept === null || goal() !== "accuracy") return "";
  const shownEnough = each => each.shown >= threshold() / 100 - 1e-9;
  if (answer().text.startsWith("No verdict")) {
    const smaller = [row, ...others].filter(each => each.k < each.full_k);
    const fit = smaller.filter(shownEnough), likely = smaller.filter(enough);
    if (fit.length) {
      const fewest = minBy(fit, each => each.k);
      return `By accuracy alone, k = ${fewest.k} of ${fewest.experts} is enough: ${fewest.keeps}.`;
    }
    if (likely.length) {
      const nearest = Math.min(...likely.map(missing));
      const next = minBy(likely.filter(each => missing(each) === nearest), each => each.k);
      return `By accuracy alone, k = ${next.k} of ${next.experts} ${next.keeps}. ${unproven(next)}.`;
    }
    return smaller.length ? `By accuracy alone, no smaller k keeps ${percent(threshold() / 100)}.` : "";
  }
  const faster = others.filter(each => each.ms < row.ms && enough(each) && unproven(each));
  if (faster.length && !unproven(row)) {
    const fewest = Math.min(...faster.map(missing)), next = minBy(faster.filter(each => missing(each) === fewest), each => each.ms);
    return `Faster: ${next.claim}. ${unproven(next)}.`;
  }
  const fewer = others.filter(each => each.k < row.k);
  if (row.k < row.full_k || !fewer.length) return "";
  const next = Math.max(...fewer.map(each => each.k));
  const claim = minBy(fewer.filter(each => each.k === next), each => each.ms).claim;
  return fewer.some(enough) ? `Fewer experts are not faster here: ${claim}.`
    : `No smaller k keeps ${percent(threshold() / 100)}. The next: ${claim}.`;
}

// Calls that take this many times the median are slow because of the machine, not of the row.
const FAR = 10;
const far = row => row.latency_ms && row.latency_ms.p99 > FAR * row.ms;

function detail(row) {
  const base = rows[row.base];
  let text = `${row.name}, ${row.sizes}${row.bundle ? `, bundle ${row.bundle}` : ""}: ${shown(row.ms)} ms`;
  if (base && base.ms !== null && base !== row) text += ` against ${shown(base.ms)} ms in PyTorch`;
  return [text + ".", why(row)].filter(Boolean).join(" ");
}

// Why a row is the answer: it is the fastest row that is proven to keep enough.
function why(row) {
  if (goal() !== "accuracy" || row !== answer().row || data.search || answer().text.startsWith("No verdict")) return "";
  const list = candidates(), proven = list.filter(each => each.shown !== null && each.shown >= threshold() / 100 - 1e-9);
  if (!proven.includes(row)) return "";
  return `Why: of ${list.length} rows, ${proven.length} are shown to keep ${percent(threshold() / 100)} by the lower end of the `
    + "95% interval, and this is the fastest of them.";
}

// The decision: the fastest row of each k, and the untouched model; values that are the same for every k are shown once.
const bytes = value => value >= 1e9 ? (value / 1e9).toFixed(2) + " GB" : value >= 1e6 ? (value / 1e6).toFixed(1) + " MB"
  : (value / 1e3).toFixed(1) + " kB";
const within95 = (value, range, text) => range ? [text(value), `${text(range.low)} to ${text(range.high)}`] : text(value);
// A mean and its standard deviation, with equal decimals, or three digits if the deviation is larger.
function plusMinus({ mean, std }) {
  const text = shown(mean), decimals = (text.split(".")[1] ?? "").length, rounded = std.toFixed(decimals);
  if (std && !Number(rounded)) return `${text} ± ${Number(std.toPrecision(1))}`;
  return `${text} ± ${std > mean ? shown(std) : rounded}`;
}
const CHOICES = [ // A phone shows the first three.
  ["Median ms", row => row.ms, (value, row) => [shown(value), plusMinus(row.latency_ms)], "", "mean ± std"],
  ["vs all experts", row => rows[row.base] === row ? null : row.gain, speed],
  ["Kept", row => row.kept, (value, row) => row.shown === null || row.shown === value ? percent(value)
    : [percent(value), `≥ ${percent(Math.floor(1e3 * row.shown + 1e-9) / 1e3)}`]],
  ["Accuracy", row => row.accuracy?.top1 ?? null, (value, row) => within95(value, row.accuracy.top1_interval, percent)],
  ["R²", row => row.regression?.r2 ?? null, value => value.toFixed(4)],
  ["Perplexity", row => row.perplexity?.value ?? null,
    (value, row) => within95(value, row.perplexity.interval, each => each.toPrecision(4))],
  ["p99 ms", row => row.latency_ms.p99, shown],
  ["Tokens/s", row => row.tokens_per_s, value => number(value)],
  ["Inputs/s", row => row.tokens_per_s === null ? row.throughput : null, value => number(value)],
  ["vs PyTorch", row => rows[row.base] === row ? null : row.speed, (value, row) => (row.told ? "" : "≈ ") + speed(value)],
  ["On disk", row => row.disk_bytes, bytes], ["Memory", row => row.peak_memory_mb, value => number(value) + " MB"],
  ["Runs in", row => row.name, (_, row) => row.untouched ? "PyTorch" : [row.engine_name,
    row.name.replace(row.engine_name, "").replace(/^, /, "")], "text"],
];

function decision(chosen) {
  byId("decision-card").hidden = !timed().length;
  const list = candidates(), ks = unique(list.map(row => row.k)).sort((a, b) => b - a);
  const own = ks.map(k => chosen?.k === k ? chosen : minBy(list.filter(row => row.k === k), row => row.ms));
  const all = [...references(), ...own];
  const told = CHOICES.filter(([, value]) => own.some(row => value(row) !== null));
  const same = own.length > 1 ? told.filter(([, value]) => own.every(row => value(row) === value(own[0]))) : [];
  const columns = told.filter(each => !same.includes(each));
  const small = text => text ? [element("small", { textContent: text })] : [];
  const head = [["k"], ...columns].map(([name, , , kind, below]) =>
    element("th", { scope: "col", className: kind ?? "" }, name, ...small(below)));
  const body = all.map(row => {
    const label = row.untouched ? "PyTorch" : `${row.k} of ${row.experts}`;
    const pick = row.untouched ? label : element("button", { type: "button", className: "pick", textContent: label,
      title: "choose this row", ariaPressed: String(row === chosen), onclick: () => change({ row: String(row.index) }) });
    return element("tr", { className: row === chosen ? "chosen" : row.untouched ? "reference" : "" },
      element("th", { scope: "row" }, pick), ...columns.map(([name, value, text, kind]) => {
        const found = value(row), bad = name === "p99 ms" && far(row);
        const [main, below] = [found === null ? "–" : text(found, row)].flat();
        return element("td", { className: `${kind ?? ""} ${bad ? "bad" : found === null ? "quiet" : ""}` }, main, ...small(below));
      }));
  });
  byId("decision").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
  const notes = same.map(([name, value, text]) => `${name.toLowerCase()} ${
    [text(value(own[0]), own[0])].flat().filter(Boolean).join(", ")}`);
  const slow = all.filter(far).map(row => `${shown(row.ms)} ms, p99 ${shown(row.latency_ms.p99)} ms (${
    row.untouched ? "PyTorch" : "k = " + row.k})`);
  byId("decision-same").textContent = notes.length ? `The same for every k: ${notes.join("; ")}.` : "";
  byId("decision-far").textContent = slow.length ? `Some calls took more than ${FAR} times the median: ${slow.join("; ")}. `
    + "Other programs ran, or threads waited for each other: run again, or with fewer --threads." : "";
}

// Charts: Vega-Lite specifications from Python, drawn with these rows and parameters.
const width = host => document.documentElement.classList.contains("print") ? 690 : host.clientWidth;
const hint = element("div", { className: "hint", hidden: true });

function draw(id, spec, list, params, label) {
  const host = byId(id);
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", label);
  const size = { width: width(host), height: host.clientHeight };
  if (!size.width) return; // folded
  if (host.spec !== spec) {
    host.view?.finalize();
    const compiled = vegaLite.compile({ ...spec, ...size, autosize: { type: "fit", contains: "padding" } }).spec;
    const names = compiled.marks.map(mark => mark.name);
    const labelled = list.some(row => row.label) && names.includes(BESIDE);
    if (labelled) placeLabels(compiled.marks.find(mark => mark.name === "chart_labels_marks"), names);
    host.spec = spec;
    host.view = new vega.View(vega.parse(compiled), { renderer: "svg" }).tooltip(point).initialize(host);
    // Vega cannot place labels next to marks until it has drawn at least one.
    if (labelled) host.view.data("rows", [{ ...list[0], index: -1, level: false }]).width(size.width).height(size.height).run();
    host.view.addEventListener("click", (_, item) => {
      const row = rows[item?.datum?.index];
      if (row && !row.untouched) change({ row: String(row.index) });
    });
  }
  const all = { keep: null, bound: null, chosen: -1, ticks: [], of: "", ...params };
  for (const [name, value] of Object.entries(all)) host.view.signal(name, value);
  host.view.width(size.width).height(size.height).data("rows", list.map(row => ({ ...row }))).run();
}

// A label is placed where it hides no mark, bar or other label.
const BESIDE = "chart_points_marks";
function placeLabels(mark, names) {
  const sides = ["top-right", "top-left", "bottom-right", "bottom-left", "right", "left", "top", "bottom"];
  mark.from = { data: BESIDE };
  mark.encode = { update: { text: { signal: "datum.datum.label || ''" }, fill: { signal: "datum.datum.label_ink || datum.datum.ink" }, fontSize: { value: 12 } } };
  mark.transform = [{ type: "label", size: { signal: "[width, height]" }, anchor: [...sides, ...sides, ...sides],
    offset: [2, 22, 42].flatMap(each => sides.map(() => each)), sort: { field: "datum.front", order: "descending" },
    avoidMarks: names.filter(name => /ring|bars/.test(name)) }];
}

// Names are text, never HTML.
function point(_, event, item, text) {
  hint.hidden = !text;
  if (!text) return;
  hint.textContent = text;
  hint.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - hint.offsetWidth - 8)) + "px";
  hint.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - hint.offsetHeight - 8)) + "px";
}

// The threshold as a share that a chart shows; one far below all rows would flatten them.
const shownThreshold = () => goal() === "accuracy" && threshold() >= 50 ? threshold() / 100 : null;

// What can be deployed: rows that keep about the requested share, and faster ones that come close.
const NEAR = 0.05;
const LISTED = 4; // The largest number of rows that are named below the chart.
const near = row => row.kept >= (shownThreshold() ?? 1) - NEAR;
function zoomed(known, chosen) {
  const own = known.filter(row => !row.engine.startsWith("pytorch") && (near(row) || row === chosen));
  const most = Math.max(...own.map(row => row.ms));
  const others = known.filter(row => row.engine.startsWith("pytorch") && row.ms <= 1.5 * most && near(row));
  return own.length ? [...own, ...others] : known;
}

// The rows that no other row beats.
function frontOf(list) {
  const found = [];
  for (const row of [...list].sort((a, b) => a.ms - b.ms || b.kept - a.kept)) {
    if (!found.length || row.kept > found.at(-1).kept) found.push(row);
  }
  return found;
}

const RUN_INKS = ["--dispatch", "--router", "--combine", "--host"]; // No precision has these colours.

function deploy(chosen) {
  const judged = timed().filter(row => row.kept !== null);
  byId("deploy-figure").hidden = !judged.length;
  if (!judged.length) return;
  const known = zoomed(judged, chosen), away = judged.filter(row => !known.includes(row));
  byId("keep-option").textContent = `${quality()} kept, at least`;
  byId("deploy-title").textContent = `What can be deployed: ${quality()} over latency`;
  const listed = away.sort((a, b) => a.ms - b.ms).slice(0, away.length > LISTED ? LISTED - 1 : LISTED)
    .map(row => `${row.untouched ? "PyTorch" : at(row)} (${shown(row.ms)} ms, ${percent(row.kept)})`);
  if (away.length > LISTED) listed.push(`and ${away.length - LISTED + 1} others in the table of rows`);
  byId("deploy-away").textContent = away.length ? `Outside the chart: ${listed.join("; ")}.` : "";
  const front = frontOf(known);
  // The axes cover the points, and the bars except for outliers.
  const own = known.map(row => ({ ...row, front: front.includes(row), label_ink: `var(--${front.includes(row) ? "ink" : "soft"})`,
    label: row.untouched ? "PyTorch" + (row.on_gpu ? ", GPU" : "") : String(row.k),
    ms_low: Math.max(0.6 * row.ms, row.ms_low), ms_high: Math.min(1.6 * row.ms, row.ms_high),
    kept_low: Math.max(row.kept - 2 * NEAR, row.kept_low), kept_high: Math.min(row.kept + 2 * NEAR, row.kept_high) }));
  const others = data.runs.flatMap((run, i) => {
    const list = run.rows.filter(row => String(row.batch) === state.batch && row.phase === state.phase && near(row)
      && (row.model === state.model || !run.rows.some(each => each.model === state.model)) && !row.name.startsWith("PyTorch"));
    return list.map(row => ({ ...row, front: frontOf(list).includes(row), run: run.name, symbol: data.symbols[6],
      ink: `var(${RUN_INKS[i % RUN_INKS.length]})`,
      hover: `${run.name}\n${row.name}\n${shown(row.ms)} ms, ${percent(row.kept)} kept` }));
  });
  const at_ = threshold(), timeBound = goal() === "latency" && at_ > 0 && at_ < Infinity;
  draw("deploy", data.charts.deploy, [...own, ...others],
    { chosen: chosen?.index, keep: shownThreshold(), bound: timeBound ? at_ : null },
    `Accuracy over latency of ${known.length} rows; on the front: ` + front.map(row =>
      `${row.untouched ? "PyTorch" : "k = " + row.k} ${shown(row.ms)} ms ${percent(row.kept)}`).join("; "));
}

// Latencies that are far apart get a logarithmic axis, unless the reader chooses otherwise.
const farApart = values => Math.max(...values) > 6 * Math.min(...values);
const logarithmic = () => state.log ? state.log === "1" : farApart(timed().map(row => row.ms));

// An engine's rows by k: one line if every k has one lowering, else a line for each lowering.
function lined(list) {
  const keyed = row => row.engine_name + row.precision;
  return list.map(row => {
    const here = list.filter(each => !each.untouched && keyed(each) === keyed(row));
    return { ...row, line: unique(here.map(each => each.k)).length === here.length ? keyed(row) : row.name };
  });
}

const quality = () => rows.some(row => row.perplexity) ? "perplexity"
  : rows.some(row => row.regression) ? "R²" : "accuracy";

const ascending = values => unique(values).sort((a, b) => a - b);

function overK(chosen) {
  const list = candidates(), all = timed();
  byId("overk-figure").hidden = !list.length;
  if (!list.length) return;
  const ks = ascending(list.map(row => row.k)), both = all.some(row => row.kept !== null);
  byId("overk-title").textContent = "Latency" + (both ? ` and ${quality()}` : "") + " by k";
  byId("overk-kept").hidden = !both;
  const params = { chosen: chosen?.index, ticks: ks, of: `experts computed, k of ${list[0].experts}` };
  const told = `for k = ${ks.join(", ")}; the table below has the numbers`;
  draw("overk", data.charts[logarithmic() ? "ms_log" : "ms"], lined(all), params, `Latency ${told}`);
  if (both) draw("overk-kept", data.charts.kept, lined(all), { ...params, keep: shownThreshold() }, `Share of ${quality()} kept ${told}`);
}

function throughput(chosen) {
  const batches = ascending(sized().map(row => row.batch));
  const figure = byId("throughput-figure");
  figure.hidden = batches.length < 2 || !chosen;
  figure.parentElement.classList.toggle("single", figure.hidden);
  if (figure.hidden) return;
  const rate = row => row.tokens_per_s ?? row.throughput ?? 1000 * row.batch / row.ms;
  const unit = chosen.tokens_per_s === null ? "inputs/s" : "tokens/s";
  const usable = sized().filter(row => row.ms !== null && inPhase(row) && fits(row));
  const sameKind = row => row.engine_name === chosen.engine_name && row.precision === chosen.precision;
  const lines = [[`k = ${chosen.k}`, row => row.k === chosen.k && sameKind(row), chosen.ink, [1, 0]],
    [chosen.full_k < chosen.experts ? "as trained" : "all experts",
      row => row.k === row.full_k && chosen.k < row.full_k && sameKind(row), chosen.ink, [2, 3]],
    ["PyTorch", row => row.untouched && row.on_gpu === (rows[chosen.base]?.on_gpu ?? false), "var(--reference)", [5, 4]]];
  const all = lines.flatMap(([line, wanted, ink, dash]) => batches.map(batch => usable.filter(row => row.batch === batch && wanted(row)))
    .filter(here => here.length).map(here => here.includes(chosen) ? chosen : minBy(here, row => -rate(row)))
    .map((row, i, best) => ({ ...row, line, ink, dash, rate: rate(row), symbol: data.symbols[0], label: i === best.length - 1 ? line : "",
      hover: `${row.hover}\n${number(rate(row))} ${unit}` })));
  draw("throughput", data.charts.throughput, all, { chosen: chosen.index, ticks: batches, of: `${unit} (log)` },
    "Throughput by batch: " + unique(all.map(row => row.line)).map(line =>
      `${line}: ${all.filter(row => row.line === line).map(row => number(row.rate)).join(", ")}`).join("; "));
}

// The times of the selected row's calls, in bins of equal factors.
function percentiles(chosen) {
  const latency = chosen?.latency_ms, counts = latency?.counts ?? [];
  byId("percentiles-figure").hidden = !counts.length;
  if (!counts.length) return;
  const factor = Math.log(latency.max / latency.min) || 1, edge = i => latency.min * Math.exp(factor * i / counts.length);
  const bins = counts.map((calls, i) => ({ calls, low: edge(i), high: edge(i + 1), ink: chosen.ink,
    hover: `${shown(edge(i))} to ${shown(edge(i + 1))} ms: ${number(calls)} calls` }));
  const marks = ["median", "p99"].map((name, i) => ({ label: `${name} ${shown(latency[name])}`, at: latency[name],
    above: Math.max(...counts) * (i ? 1.8 : 4.5), right: Math.log(latency[name] / latency.min) > factor / 2 }));
  draw("percentiles", data.charts.calls, [...bins, ...marks], { of: `calls of ${number(latency.n)} (log)` },
    "Latency: " + ["min", "median", "p90", "p95", "p99", "max"].map(each => `${each} ${shown(latency[each])} ms`).join(", "));
}

// Tokens per second in each phase, and perplexity, over k: a line for each engine and precision.
function tokens(chosen) {
  const list = sized().filter(row => String(row.batch) === state.batch && row.tokens_per_s !== null && fits(row));
  byId("tokens-card").hidden = !list.length;
  if (!list.length) return;
  for (const phase of ["decode", "prefill"]) tokensOverK(phase, list.filter(row => row.phase === phase), "rate", chosen);
  // Quality does not depend on the phase. PyTorch's rows have the quality of the FP32 graphs.
  const judged = list.filter(row => row.perplexity && row.phase === list[0].phase);
  const graphs = judged.filter(row => row.untouched || !row.engine.startsWith("pytorch"));
  tokensOverK("perplexity", graphs.some(row => !row.untouched) ? graphs : judged, "ppl", chosen);
}

function tokensOverK(id, list, field, chosen) {
  byId(`tokens-${id}-figure`).hidden = !list.length;
  if (!list.length) return;
  const far = farApart(list.flatMap(row => [row[`${field}_low`], row[`${field}_high`]]));
  const same = list.find(row => chosen && row.name === chosen.name && row.k === chosen.k);
  draw(`tokens-${id}`, data.charts[far ? field + "_log" : field], lined(list), { chosen: same?.index,
    ticks: ascending(list.map(row => row.k)), of: `experts for a token, k of ${list[0].experts}` },
  `${field === "rate" ? "tokens/s" : "perplexity"} of ${id} by k: `
    + list.filter(row => !row.untouched).map(row => `k = ${row.k} ${row.short} ${shown(row[field])}`).join("; "));
}

function routing() {
  if (data.search) return "";
  const kind = data.results.models.find(model => model.name === state.model)?.kind;
  const list = candidates(), exports = list.filter(row => !row.engine.startsWith("pytorch"));
  const known = list.filter(row => row.routing);
  if (known.length) {
    const worst = minBy(known, row => row.same), tokens = worst.routing.choices != null;
    return worst.same >= 1
      ? `Routing: every row selected the same experts as PyTorch for every ${tokens ? "token in every layer" : "sample"}.`
      : `Routing: the same experts as PyTorch for ${percent(worst.same)} (k = ${worst.k}, ${worst.short}) `
        + `to ${percent(Math.max(...known.map(row => row.same)))} of ${tokens ? "tokens and layers" : "samples"}.`;
  }
  const why = !list.length ? "nothing was measured" : list.every(row => row.k === row.experts)
    ? "every row here computes all its experts" : !exports.length
      ? "only PyTorch was measured, so there is nothing to compare it with"
      : kind === "mumoe" ? "muMoE layers weigh all experts for every token and choose no set for an input"
        : `${unique(exports.map(row => row.engine_name)).join(" and ")} does not show which experts it chose`;
  return `Routing is not compared: ${why}.`;
}

function stacked(id, names, series, unit, label) {
  byId(id).style.height = Math.max(130, 28 * names.length + 66) + "px";
  const parts = series.flatMap(({ name, ink, values }, order) => values.map((value, i) => ({ place: i, order, value, ink: `var(${ink})`,
    hover: `${names[i]}\n${name}: ${shown(value)} ${unit.split(" ")[0]}` })));
  draw(id, data.charts.stacked, parts, { ticks: names, of: unit }, label);
}

function key(id, entries) {
  byId(id).replaceChildren(...entries.map(([name, drawn]) => {
    const chip = element("span", { className: "key" });
    chip.innerHTML = drawn; // Only our own markup; the name is text.
    chip.append(name);
    return chip;
  }));
}

const box = ink => `<i style="background: ${ink}"></i>`;
const at = row => `${row.short}, k = ${row.k}`;

const glyph = (path, ink = "currentColor") =>
  `<svg width="12" height="12" viewBox="-1.2 -1.2 2.4 2.4" aria-hidden="true"><path d="${path}" fill="${ink}"/></svg>`;
const REFERENCE = ["PyTorch, untouched", `<svg width="14" height="12" aria-hidden="true"><path d="M0 6h14"
  stroke="var(--reference)" stroke-width="2" stroke-dasharray="4 2.5"/></svg>`];

function legend() {
  const list = candidates(), distinctBy = field => unique(list.map(field)).map(value => list.find(row => field(row) === value));
  key("legend", [...distinctBy(row => row.precision).map(row => [row.precision.toUpperCase(), box(row.ink)]),
    ...distinctBy(style).map(row => [style(row), glyph(row.symbol)]), ...references().length ? [REFERENCE] : [],
    ...data.runs.map((run, i) => [run.name, box(`var(${RUN_INKS[i % RUN_INKS.length]})`)])]);
}

function parts(chosen) {
  const all = candidates().filter(row => row.parts.length);
  byId("parts-card").hidden = !all.length;
  if (!all.length) return;
  const inks = Object.keys(PARTS);
  key("parts-key", inks.map(part => [PARTS[part], box(`var(--${part})`)]));
  const sum = (row, wanted) => row.parts.filter(wanted).reduce((total, part) => total + part.ms, 0);
  stacked("parts", all.map(at), inks.map(part => ({ name: PARTS[part], ink: "--" + part,
    values: all.map(row => sum(row, p => p.part === part)) })), "ms per call, as profiled", "Time by part, for every graph");
  const row = all.includes(chosen) ? chosen : all[0];
  const layers = unique(row.parts.map(part => part.layer ?? part.part));
  stacked("layers", layers.map(name => PARTS[name] ?? name), inks.map(part => ({ name: PARTS[part], ink: "--" + part,
    values: layers.map(name => sum(row, p => p.part === part && (p.layer ?? p.part) === name)) })),
  "ms per call, as profiled", `Time by layer of ${at(row)}`);
}

function memory() {
  const all = [...references(), ...candidates()].filter(row => row.peak_memory_mb !== null);
  byId("memory-card").hidden = !all.length;
  if (!all.length) return;
  key("memory-key", [["runtime alone", box("var(--runtime)")], ["model and batch", box("var(--experts)")]]);
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
  ["Engine", row => row.name, String, "text wrap"],
  ["Speed", row => row.speed, (value, row) => rows[row.base] === row ? "1×" : (row.told ? "" : "≈ ") + speed(value)],
  ["Kept", row => row.kept, percent],
  ["Phase", row => row.phase, String, "text"], ["Tokens/s", row => row.tokens_per_s, number],
  ["Batch", row => row.batch, String], ["Model", row => row.model, String, "text"],
  ...data.gpu ? [[data.gpu, row => row.device_ms?.median ?? null, shown]] : [],
  [rows.some(row => row.accuracy?.attributes?.length) ? "Accuracy" : "Top-1", row => row.accuracy?.top1 ?? null, value => (100 * value).toFixed(2) + "%"],
  ["Top-5", row => row.accuracy?.top5 ?? null, value => (100 * value).toFixed(2) + "%", "extra"],
  ["Perplexity", row => row.perplexity?.value ?? null, value => value.toPrecision(4)],
  ["R²", row => row.regression?.r2 ?? null, value => value.toFixed(4)],
  ["Same experts", row => row.same, percent],
  ["× limit", row => row.ms && row.limit_ms ? row.ms / row.limit_ms : null,
    value => value < 1 ? "limit does not apply" : value.toFixed(value < 10 ? 1 : 0), "narrow"],
  ["Spread", row => row.spread, value => (100 * value).toFixed(0) + "%"],
  time("p90", "p90"), time("p95", "p95"), time("p99", "p99"), time("Min", "min"), time("Max", "max"),
  time("Mean", "mean"), time("Std", "std"), ["Calls", row => row.latency_ms?.n ?? null, number, "extra"],
  ["Inputs/s", row => row.throughput, number], ["Memory MB", row => row.peak_memory_mb, number],
  ["Bundle", row => row.bundle, String, "text"],
].filter(([name, value]) => rows.some(row => value(row) !== null));
// The columns in which the shown rows differ.
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
      // Rows without the value stay at the end in both directions.
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

// Texts with more characters are broken into lines.
const LONG = 32;

// Fills the parts that do not change with the controls.
function renderFixedParts() {
  byId("disturbed").textContent = data.disturbed;
  byId("environment").replaceChildren(...data.environment.flatMap(([name, value]) =>
    [element("dt", { textContent: name }), element("dd", { textContent: value })]));
  const listed = items => element("ul", {}, ...items.map(item => element("li", { textContent: item })));
  byId("method").replaceChildren(listed(data.method),
    ...data.absent.length ? [element("h3", { textContent: "Not measured" }), listed(data.absent)] : [],
    ...data.again ? [element("h3", { textContent: "Reproduce" }), element("pre", { textContent: data.again })] : []);
  for (const card of data.tables) {
    const chart = document.getElementById(`${card.id}-card`), made = section(card);
    if (chart) chart.after(made); // The numbers of a chart are below it.
    else byId(card.first ? "answers" : "tables").append(made);
  }
}

function section(card) {
  return element("details", { className: "card", id: card.id, open: card.open },
    element("summary", {}, element("h2", { textContent: card.title })),
    ...card.intro.map(text => element("p", { className: "note", textContent: text })),
    ...card.tables.flatMap(({ title: name, heads, groups }) => [
      ...name ? [element("h3", { textContent: name })] : [],
      element("div", { className: "scroll", tabIndex: 0 }, element("table", {},
        element("thead", {}, element("tr", {}, ...heads.map((text, i) =>
          element("th", { scope: "col", textContent: text, className: i ? "" : "text" })))),
        ...Object.entries(groups).map(([group, lines]) => element("tbody", {},
          element("tr", {}, element("th", { scope: "rowgroup", colSpan: heads.length }, element("span", { textContent: group }))),
          ...lines.map(cells => element("tr", {}, ...cells.map((cell, i) => {
            const [text, kind] = Array.isArray(cell) ? cell : [cell, ""], heat = kind.match(/^heat-(\d)$/)?.[1];
            const made = element("td", { textContent: text, className: `${heat ? "heat" : kind} ${i ? "" : "text"} ${text.length > LONG ? "long" : ""}` });
            if (heat) made.style.setProperty("--heat", heat);
            return made;
          })))))))]),
    ...card.notes.map(text => element("p", { className: "note", textContent: text })));
}

function fill(id, values, label = String, every = "all") {
  const select = byId(id), options = every ? ["", ...values] : values;
  if (!options.map(String).includes(state[id])) state[id] = every ? "" : String(options[0] ?? "");
  select.replaceChildren(...options.map(value =>
    element("option", { value, textContent: value === "" ? every : label(value), selected: String(value) === state[id] })));
  select.parentElement.hidden = values.length < 2;
}

// The slider covers the values of all rows, linearly or, for latency, logarithmically.
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
  if (typeof vegaLite === "undefined") return; // Not unpacked yet.
  controls();
  const found = answer(), picked = candidates().find(row => String(row.index) === state.row);
  const chosen = picked ?? found.row;
  byId("subject").textContent = state.model;
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
let resized = 0;
addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(render); });
addEventListener("hashchange", () => { restore(); render(); });
// A print is light and as wide as A4, whatever the screen.
let folded = [];
for (const [name, on] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => {
    document.documentElement.classList.toggle("print", on);
    if (on) folded = [...document.querySelectorAll("details:not([open])")];
    for (const each of folded) each.open = on;
    render();
  });
}
// Folded parts have no width, so they are drawn when they open.
document.addEventListener("toggle", event => event.target.open && render(), true);

// Vega and Vega-Lite are compressed in the page, to a third of their size.
async function start() {
  restore();
  renderFixedParts();
  const packed = Uint8Array.from(atob(byId("vega").textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", { textContent: await new Response(stream).text() }));
  document.body.append(hint);
  render();
  await Promise.all([...document.querySelectorAll(".chart")].map(host => host.view?.runAsync()));
  document.documentElement.dataset.drawnMs = performance.now().toFixed(0);
}

start().catch(error => {
  byId("disturbed").textContent = `The charts cannot be drawn in this browser (${error.message}); `
    + "report.md and report.csv next to this page contain the same rows.";
});
