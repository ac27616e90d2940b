// Every point of a search.
() => {
  const found = data.search;
  byId("search-card").hidden = !found;
  if (!found) return;
  const points = [...found.points].sort((a, b) => b.ms - a.ms), front = points.filter(each => each.front);
  const spot = (list, extra) => ({ x: list.map(each => each.ms), y: list.map(each => each.kept), mode: "markers",
    cliponaxis: false, text: list.map(each => each.told.map(plain).join("<br>")),
    hovertemplate: "%{text}<extra></extra>", ...extra });
  const chosen = points.find(each => each.chosen);
  const traces = [
    { x: front.map(each => each.ms), y: front.map(each => each.kept), mode: "lines", hoverinfo: "skip",
      line: { color: colour("--soft"), width: 1.5, shape: "vh" } },
    spot(points.filter(each => !each.front), { marker: { color: colour("--soft"), size: 7, symbol: "circle-open" } }),
    spot(front, { marker: { color: colour("--accent"), size: 9 }, error_y: bars(
      front.map(each => each.searched.high - each.kept), front.map(each => each.kept - each.searched.low),
      { color: colour("--accent") }) }),
    ...chosen ? [ring(chosen.ms, chosen.kept)] : []];
  const logs = points.map(each => Math.log10(each.ms)), kept = points.map(each => each.kept);
  const side = 0.06 * Math.max(0.4, Math.max(...logs) - Math.min(...logs));
  const x = [Math.min(...logs) - side, Math.max(...logs) + side];
  const low = Math.min(...kept, found.keep ?? 1), high = Math.max(1, ...front.map(each => each.searched.high));
  const y = [Math.max(-0.02, low - 0.08 * (high - low)), high + 0.06 * (high - low)];
  const shapes = found.keep ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: found.keep, y1: found.keep,
    line: { color: colour("--accent"), width: 1.2, dash: "dash" } }] : [];
  draw("search-chart", traces, { shapes,
    xaxis: axis({ type: "log", range: x, title: { text: "median latency, ms (log)" }, ...steps(...x) }),
    yaxis: axis({ ...shares(y), title: { text: `${found.metric} kept` } }) },
  `What is kept over latency of ${points.length} models that a search made`);
}
