// Draws the charts of a report with Chart.js, in the colors of the page's light or dark scheme.
"use strict";
(() => {
  // Any two also differ for readers who can't see red or green, and each from a light and a dark card.
  const COLORS = ["#2f7ed8", "#d1702e", "#329f8b", "#674cfe", "#da0a54", "#8f5996", "#6174fd", "#0499cc"];
  const FAINT = "#7f8898";
  // Markers of lines that lie on each other, such as a cross on a circle.
  const MARKERS = ["circle", "crossRot", "cross", "star"];
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let drawn = [];

  const full = (value) =>
    typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 5 }) : value;
  const colorOf = (number) => (number < 0 ? FAINT : COLORS[number % COLORS.length]);
  const isOneBar = (chart) => chart.kind === "bars" && chart.series.every((one) => one.points.length === 1);
  const isLine = (chart) => chart.kind === "lines";
  const values = (chart) =>
    chart.series.flatMap((one) => [...one.points.map(([, y]) => y), ...one.spread.flat()]).filter((y) => y !== null);
  const places = (chart) => [...new Set(chart.series.flatMap((one) => one.points.map(([x]) => x)))];

  // Chart.js writes small numbers as 1.000000E-5. On a logarithmic axis it labels few ticks, as 10,000,000.00.
  // Labels of an axis with large numbers would leave no room for the chart.
  function tick(value, index, ticks) {
    const isLog = this.type === "logarithmic";
    // The end of a logarithmic axis is a tick, too.
    if (isLog && Math.abs(value.toPrecision(1) - value) > 1e-9 * value) return "";
    const text = Chart.Ticks.formatters[isLog ? "logarithmic" : "numeric"].call(this, value, index, ticks);
    const isShort = ticks.every((each) => Number(each.value.toPrecision(4)) === each.value);
    const isLarge = isShort && ticks.some((each) => Math.abs(each.value) >= 1e8);
    const isLong = text.includes("E") || (isLarge && value) || (isLog && (value < 1e-3 || value >= 1e5));
    if (!text || !(isLog || isLong)) return text;
    return isLong ? Number(value.toPrecision(4)).toExponential() : full(value);
  }

  // Sizes in bytes are powers of two.
  function size(bytes) {
    const at = Math.min(3, Math.floor(Math.log2(bytes) / 10));
    return `${full(bytes / 1024 ** at)} ${["B", "KiB", "MiB", "GiB"][at]}`;
  }

  // A line that hides others is drawn on top of these with gaps, through which they can be seen.
  function dash(series, number) {
    if (series.dash.length) return series.dash;
    const on = 12 / (series.covers + 1);
    return series.covers ? [on, 12 - on] : number < COLORS.length ? [] : [9, 3];
  }

  function line(chart, series, index, smooth, card) {
    const number = Array.isArray(series.color) ? index : (series.color ?? index);
    const color = colorOf(number);
    const points = smooth && series.smooth.length ? series.smooth : series.points;
    const isPoints = chart.kind === "points";
    const radius = series.errors.length ? 3 : isPoints || (chart.has_points && !series.dash.length) || (series.marks && points.length < 30) ? 4.5 : series.marks || points.length < 3 ? 2.5 : 0;
    // No line is drawn to a point between two gaps.
    const isApart = (at) => [points[at - 1], points[at + 1]].every((near) => !near || near[1] === null);
    return {
      label: series.name,
      run: series.run || series.name,
      data: points.map(([x, y]) => (isOneBar(chart) ? { x: y, y: x } : { x, y })),
      borderColor: color,
      backgroundColor: isLine(chart) ? color : color + "b0",
      pointBackgroundColor: Array.isArray(series.color) ? series.color.map(colorOf) : color,
      pointBorderColor: Array.isArray(series.color) ? series.color.map(colorOf) : series.covers ? color : card,
      pointStyle: MARKERS[Math.min(series.covers, MARKERS.length - 1)],
      pointBorderWidth: series.covers ? 2 : 1,
      borderWidth: chart.kind === "bars" ? 0 : series.marks ? 1 : 1.8,
      borderDash: dash(series, number),
      pointRadius: radius || points.map((_, at) => (isApart(at) ? 3.5 : 0)),
      pointHitRadius: 8,
      // A marker at the end of an axis is drawn in full.
      clip: 8,
      // Chart.js draws a lower order on top.
      order: -series.covers - (series.marks ? charts.length + 1000 : 0),
      fill: chart.kind === "areas" ? (index ? "-1" : "origin") : false,
      errors: series.errors,
      showLine: !isPoints,
    };
  }

  // The edges of a band, or the measured points behind a smoothed line. They have no entry in the legend.
  function behind(main, points, more) {
    const own = { ...main, ...more, data: points.map(([x, y]) => ({ x, y })) };
    return { ...own, isBehind: true, borderDash: [], pointRadius: 0, pointHitRadius: 0, order: 2000 };
  }

  function datasets(chart, smooth, card) {
    return chart.series.flatMap((series, index) => {
      const main = line(chart, series, index, smooth, card);
      const faint = main.borderColor + "38";
      const edge = (side) => series.points.map(([x], at) => [x, series.spread[at][side]]);
      // The axis has room for the error bars.
      if (series.errors.length) {
        const ends = (side) => series.points.map(([x], at) => [x, series.errors[at][side]]);
        return [main, ...[0, 1].map((side) => behind(main, ends(side), { showLine: false, errors: [] }))];
      }
      if (series.spread.length)
        return [
          main,
          behind(main, edge(0), { borderWidth: 0 }),
          behind(main, edge(1), { borderWidth: 0, fill: "-1", backgroundColor: faint }),
        ];
      return smooth && series.smooth.length
        ? [main, behind(main, series.points, { borderColor: main.borderColor + "50", borderWidth: 1 })]
        : [main];
    });
  }

  // An entry for each run, which may have a line of training and markers of evaluations.
  function entries(chart, color) {
    const all = chart.data.datasets;
    return all.flatMap((one, at) => all.findIndex((other) => other.run === one.run) < at ? [] : [{
      text: one.run,
      fontColor: color,
      fillStyle: one.backgroundColor,
      strokeStyle: one.borderColor,
      lineWidth: 2,
      // A dash is longer than the line of an entry.
      lineDash: one.borderDash.map((length) => length / 4),
      pointStyle: chart.config.type === "bar" || one.fill ? "rect" : one.order < -1000 ? one.pointStyle : "line",
      hidden: !chart.isDatasetVisible(at),
      datasetIndex: at,
    }]);
  }

  function toggleRun(event, item, legend) {
    const chart = legend.chart;
    const isShown = chart.isDatasetVisible(item.datasetIndex);
    chart.data.datasets.forEach((one, at) => one.run === item.text && chart.setDatasetVisibility(at, !isShown));
    chart.update();
  }

  // No point lies on the edge.
  function logarithmic(all) {
    const positive = all.filter((value) => value > 0);
    return { type: "logarithmic", min: Math.min(...positive) / 1.3, max: Math.max(...positive) * 1.3 };
  }

  // Ticks at the values of a parameter or size. Chart.js has ticks of its own for all other axes.
  function parameterTicks(chart) {
    const own = places(chart);
    return {
      ...logarithmic(own),
      afterBuildTicks: (axis) => {
        axis.ticks = own.map((value) => ({ value }));
      },
    };
  }

  function options(chart, style, log) {
    const text = style.getPropertyValue("--faint").trim();
    const grid = style.getPropertyValue("--line").trim();
    const stacked = chart.kind === "areas" || chart.kind === "bars";
    const labelled = chart.kind === "bars" || places(chart).some((x) => typeof x === "string");
    const axis = (title, own, ticks) => ({
      title: { display: Boolean(title), text: title, color: text },
      ticks: { color: text, maxRotation: 30, maxTicksLimit: 8, ...ticks },
      grid: { color: grid },
      ...own,
    });
    const linear = { stacked, beginAtZero: stacked || chart.from_zero, grace: chart.from_zero && chart.y !== "%" ? "5%" : 0 };
    const value = axis(chart.y, log ? logarithmic(values(chart)) : linear, { callback: tick });
    const isTime = ["s", "minutes", "hours"].includes(chart.x);
    const whole = !isTime && places(chart).every(Number.isInteger) ? { precision: 0 } : {};
    const end = chart.x_end === null ? {} : { max: chart.x_end };
    const place = labelled
      ? axis(chart.x, { type: "category", stacked }, { maxTicksLimit: 16 })
      : chart.x_log
        ? axis(chart.x, parameterTicks(chart), { callback: (tick) => chart.x_bytes ? size(tick) : String(tick), autoSkipPadding: 8 })
        : axis(chart.x, { type: "linear", stacked: false, beginAtZero: isTime, ...end }, { callback: tick, includeBounds: chart.x_end === null, ...whole });
    const lies = isOneBar(chart);
    return {
      locale: "en",
      indexAxis: lies ? "y" : "x",
      animation: false,
      maintainAspectRatio: false,
      normalized: true,
      interaction: { mode: chart.kind === "points" ? "nearest" : "index", intersect: false },
      plugins: {
        legend: {
          display: chart.series.length > 1,
          labels: { usePointStyle: true, boxHeight: 6, padding: 8, generateLabels: (drawing) => entries(drawing, text) },
          onClick: toggleRun,
        },
        tooltip: {
          filter: (item) => !item.dataset.isBehind,
          callbacks: { label: (item) => `${item.dataset.label}: ${full(lies ? item.parsed.x : item.parsed.y)}` },
        },
      },
      scales: lies ? { x: value, y: place } : { x: place, y: value },
    };
  }

  const figures = [...document.querySelectorAll("canvas")].map((canvas, at) => {
    const chart = charts[at];
    const state = { smooth: false, log: chart.y_log };
    const buttons = canvas.closest("figure").querySelector(".toggles");
    const offer = (name, isPossible) => {
      if (!isPossible) return;
      const button = document.createElement("button");
      button.textContent = name;
      button.setAttribute("aria-pressed", String(state[name]));
      button.addEventListener("click", () => {
        state[name] = !state[name];
        button.setAttribute("aria-pressed", String(state[name]));
        draw();
      });
      buttons.append(button);
    };
    offer("smooth", chart.series.some((one) => one.smooth.length));
    const positive = values(chart).filter((y) => y > 0);
    const isWide = values(chart).every((y) => y >= 0) && Math.max(...positive) >= 10 * Math.min(...positive);
    // An axis alone that is logarithmic would bend a line to compare with.
    const isCompared = chart.series.some((one) => one.dash.length);
    offer("log", !isCompared && isWide && (isLine(chart) || chart.kind === "points"));
    canvas.parentElement.classList.toggle("low", isOneBar(chart));
    const runs = new Set(chart.series.map((one) => one.run || one.name));
    canvas.parentElement.classList.toggle("tall", isCompared || (!isOneBar(chart) && runs.size > 4));
    return { canvas, chart, state };
  });

  // Draws a bar with ends at each point with an error.
  const errorBars = {
    id: "errorBars",
    afterDatasetsDraw: (drawing) => {
      const { ctx, scales } = drawing;
      drawing.data.datasets.forEach((one, at) => {
        if (!one.errors?.length || !drawing.isDatasetVisible(at)) return;
        ctx.save();
        ctx.strokeStyle = one.borderColor;
        ctx.lineWidth = 1.5;
        ctx.beginPath();
        one.errors.forEach(([low, high], point) => {
          const x = scales.x.getPixelForValue(one.data[point].x);
          const [bottom, top] = [low, high].map((value) => scales.y.getPixelForValue(value));
          ctx.moveTo(x, bottom);
          ctx.lineTo(x, top);
          for (const y of [bottom, top]) {
            ctx.moveTo(x - 4, y);
            ctx.lineTo(x + 4, y);
          }
        });
        ctx.stroke();
        ctx.restore();
      });
    },
  };

  function draw() {
    drawn.forEach((one) => one.destroy());
    const style = getComputedStyle(document.documentElement);
    drawn = figures.map(({ canvas, chart, state }) => new Chart(canvas, {
      type: chart.kind === "bars" ? "bar" : "line",
      data: { datasets: datasets(chart, state.smooth, style.getPropertyValue("--card").trim()) },
      options: options(chart, style, state.log),
      plugins: [errorBars],
    }));
    document.documentElement.dataset.drawn = String(drawn.length);
  }

  draw();
  dark.addEventListener("change", draw);
})();
