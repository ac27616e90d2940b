// Every point of a search.
() => {
  const found = data.search;
  byId("search-card").hidden = !found;
  if (!found) return;
  key("search-key", found.keys.map(([name, ink]) => [name, box(ink)]));
  draw("search-chart", found.chart, found.points, { keep: found.keep, chosen: found.chosen ?? -1 },
    `Share kept over latency of ${found.points.length} models that a search made`);
}
