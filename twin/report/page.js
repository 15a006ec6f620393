"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const asked = new URLSearchParams(location.search).get("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  // Puts the colours of the present theme where a figure names a variable.
  function paint(value, style) {
    if (typeof value === "string") {
      const name = /^var\((--[a-z0-9-]+)\)$/.exec(value);
      return name ? style.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => paint(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, paint(item, style)]));
    }
    return value;
  }

  function axis(own, style) {
    return {
      gridcolor: style.getPropertyValue("--grid"), linecolor: style.getPropertyValue("--rule"),
      zerolinecolor: style.getPropertyValue("--rule"), automargin: true, ...own,
      title: { ...own.title, standoff: 6 },
    };
  }

  function draw(name) {
    const place = document.getElementById("chart-" + name);
    const style = getComputedStyle(root);
    const figure = paint(figures[name], style);
    const narrow = place.clientWidth < 480;
    const layout = {
      bargap: 0.1, ...figure.layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: 12, color: style.getPropertyValue("--ink") },
      margin: { l: 52, r: 16, t: 12, b: 40 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", font: { size: narrow ? 10 : 12 } },
      xaxis: axis(figure.layout.xaxis, style), yaxis: axis(figure.layout.yaxis, style),
      hoverlabel: { bgcolor: style.getPropertyValue("--card") },
    };
    Plotly.react(place, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  function theme() {
    root.dataset.theme = asked || (prefersDark.matches ? "dark" : "light");
    Object.keys(figures).forEach(draw);
  }

  // Timelines show the same stretch of time.
  const timelines = [...document.querySelectorAll(".times .chart")];
  let moving = false;
  async function show(from, to, except) {
    if (moving) return;
    moving = true;
    const change = from === null ? { "xaxis.autorange": true } : { "xaxis.range": [from, to] };
    await Promise.all(timelines.filter((place) => place !== except).map((place) => Plotly.relayout(place, change)));
    moving = false;
  }

  theme();
  prefersDark.addEventListener("change", theme);
  for (const place of timelines) {
    place.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) show(change["xaxis.range[0]"], change["xaxis.range[1]"], place);
      else if (change["xaxis.autorange"]) show(null, null, place);
    });
  }
  for (const row of document.querySelectorAll("tr[data-at]")) {
    row.addEventListener("click", () => {
      const at = Number(row.dataset.at);
      const width = Number(row.dataset.width);
      show(Math.max(0, at - width), at + width, null);
      document.getElementById("timelines").scrollIntoView({ behavior: "smooth" });
    });
  }
  root.dataset.ready = "yes";
})();
