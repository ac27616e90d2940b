// Draws the highest rate within the bound over k, and latencies against the offered rate.
() => {
  const found = data.service;
  byId("service-card").hidden = !found;
  if (!found) return;
  byId("service-answer").replaceChildren(...found.answers.flatMap((text, i) => i ? [element("br"), text] : [text]));
  byId("service-bound").textContent = `The highest rate with p99 ≤ ${found.bound} ms, over k`;
  key("service-key", [...found.keys.map(([name, symbol, ink]) => [name, glyph(symbol, ink)]), ...found.pytorch ? [REFERENCE] : []]);
  draw("service-rate", found.charts.rate, found.rates, { ticks: found.ks, of: "experts computed, k" },
    `Requests per second within ${found.bound} ms over k`);
  const figure = byId("service-latency").parentElement;
  figure.hidden = !found.latencies.length;
  figure.parentElement.classList.toggle("single", figure.hidden);
  if (!figure.hidden) draw("service-latency", found.charts.latency, found.latencies, { bound: found.bound }, "Latency against the offered rate");
}
