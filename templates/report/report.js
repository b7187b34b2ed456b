// Draws the charts of a report with Chart.js, in the colors of the page's light or dark scheme.
"use strict";
(() => {
  const COLORS = ["#2f7ed8", "#e07b39", "#2a9d6f", "#c0508f", "#8a6fd1", "#b59a1f", "#3aa7b8", "#c94f4f"];
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let drawn = [];

  const short = (value) => (typeof value === "number" ? Number(value.toPrecision(4)).toLocaleString("en") : value);

  const isOneBar = (chart) => chart.kind === "bars" && chart.series.every((one) => one.points.length === 1);

  function dataset(chart, series, index) {
    const color = COLORS[index % COLORS.length];
    return {
      label: series.name,
      data: series.points.map(([x, y]) => (isOneBar(chart) ? { x: y, y: x } : { x, y })),
      borderColor: color,
      backgroundColor: chart.kind === "lines" ? color : color + "b0",
      borderWidth: chart.kind === "bars" ? 0 : 1.6,
      borderDash: index < COLORS.length ? [] : [6, 3],
      pointRadius: chart.kind === "points" ? 4 : series.points.length < 3 ? 3 : 0,
      pointHitRadius: 8,
      fill: chart.kind === "areas" ? (index ? "-1" : "origin") : false,
      showLine: chart.kind !== "points",
    };
  }

  function options(chart, style) {
    const text = style.getPropertyValue("--faint").trim();
    const grid = style.getPropertyValue("--line").trim();
    const stacked = chart.kind === "areas" || chart.kind === "bars";
    const labelled = chart.kind === "bars" || chart.series.some((one) => one.points.some(([x]) => typeof x === "string"));
    const axis = (title, more) => ({
      title: { display: Boolean(title), text: title, color: text },
      ticks: { color: text, maxRotation: 30, maxTicksLimit: 8, ...more.ticks },
      grid: { color: grid },
      ...more.own,
    });
    const value = axis(chart.y, { own: { stacked, beginAtZero: stacked }, ticks: { callback: short } });
    const place = axis(chart.x, labelled
      ? { own: { type: "category", stacked }, ticks: { maxTicksLimit: 16 } }
      : { own: { type: "linear", stacked: false }, ticks: { callback: short } });
    const lies = isOneBar(chart);
    return {
      indexAxis: lies ? "y" : "x",
      animation: false,
      maintainAspectRatio: false,
      normalized: true,
      interaction: { mode: chart.kind === "points" ? "nearest" : "index", intersect: false },
      plugins: {
        legend: { display: chart.series.length > 1, labels: { color: text, boxWidth: 10, boxHeight: 10 } },
        tooltip: {
          callbacks: { label: (item) => `${item.dataset.label}: ${short(lies ? item.parsed.x : item.parsed.y)}` },
        },
      },
      scales: lies ? { x: value, y: place } : { x: place, y: value },
    };
  }

  function draw() {
    drawn.forEach((one) => one.destroy());
    const style = getComputedStyle(document.documentElement);
    document.querySelectorAll("canvas").forEach((canvas, at) => {
      canvas.parentElement.classList.toggle("low", isOneBar(charts[at]));
    });
    drawn = [...document.querySelectorAll("canvas")].map((canvas, at) => new Chart(canvas, {
      type: charts[at].kind === "bars" ? "bar" : "line",
      data: { datasets: charts[at].series.map((series, index) => dataset(charts[at], series, index)) },
      options: options(charts[at], style),
    }));
    document.documentElement.dataset.drawn = String(drawn.length);
  }

  draw();
  dark.addEventListener("change", draw);
  addEventListener("beforeprint", () => drawn.forEach((one) => one.resize()));
  addEventListener("afterprint", () => drawn.forEach((one) => one.resize()));
})();
