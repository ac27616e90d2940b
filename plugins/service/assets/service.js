// The rate that keeps the bound over k, and latencies over the rate that is offered.
() => {
  const found = data.service;
  byId("service-card").hidden = !found;
  if (!found) return;
  byId("service-bound").textContent = `The most that keeps p99 ≤ ${found.bound} ms, over k`;
  const shade = i => `hsl(${(215 + 137 * i) % 360} 60% 50%)`, level = (y, dash) =>
    ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("--soft"), width: 1.2, dash } });
  draw("service-rate", found.lines.map(({ name, model, k, rate }, i) => ({ x: k, y: rate, mode: "lines+markers",
    line: { color: shade(i) }, text: rate.map((each, at) => `${plain(model)}: ${plain(name)}, k = ${k[at]}<br>${number(each)} requests/s`),
    hovertemplate: "%{text}<extra></extra>" })), { shapes: found.pytorch.map(each => level(each.rate, "dash")),
    xaxis: axis({ type: "log", title: { text: "k (log)" } }), yaxis: axis({ rangemode: "tozero", title: { text: "requests/s" } }) },
  `Requests per second within ${found.bound} ms over k`);
  draw("service-latency", found.offered.flatMap(({ name, rate, p50, p99 }, i) => [["p99", p99, "solid"], ["p50", p50, "dot"]]
    .map(([what, ms, dash]) => ({ x: rate, y: ms, mode: "lines+markers", line: { color: shade(i), dash },
      text: ms.map((each, at) => `${plain(name)}<br>${number(rate[at])} requests/s offered: ${what} ${shown(each)} ms`),
      hovertemplate: "%{text}<extra></extra>" }))), { shapes: [level(found.bound, "dot")],
    xaxis: axis({ type: "log", title: { text: "offered requests/s (log)" } }), yaxis: axis({ type: "log", title: { text: "ms (log)" } }) },
  "Latency over the offered rate");
}
