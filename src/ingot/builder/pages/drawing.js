"use strict";
// Figures of the pages as SVG, in the style of ingot.validation.report.svg, and tables that say the same.
const drawing = (() => {
  const WIDTH = 420, HEIGHT = 264, LEFT = 62, RIGHT = 12, TOP = 26, BOTTOM = 46;
  const SPACE = "http://www.w3.org/2000/svg";

  function make(name, attributes = {}, ...children) {
    const node = SVG_NAMES.has(name) ? document.createElementNS(SPACE, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  const SVG_NAMES = new Set(["svg", "title", "line", "rect", "circle", "path", "text", "g"]);

  const fixed = (value, digits = 0) => {
    const [whole, rest] = Math.abs(value).toFixed(digits).split(".");
    const sign = value < 0 && Number(value.toFixed(digits)) !== 0 ? "-" : "";
    return sign + whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? "." + rest : "");
  };
  const short = value => {
    const size = Math.abs(value);
    if (!size) return "0";
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return size < 0.001 ? value.toExponential(0) : String(+value.toPrecision(3));
  };
  const percent = (share, digits = 0) => `${fixed(share * 100, digits)}%`;
  const bytes = value => {
    const sizes = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
    const [unit, size] = sizes.find(([, least]) => value >= least) || ["B", 1];
    return size === 1 ? `${fixed(value)} B` : `${fixed(value / size, 2)} ${unit}`;
  };

  function scale(low, high, start, end) {
    const map = value => start + (value - low) / (high - low) * (end - start);
    return Object.assign(map, {low, high, start, end});
  }
  const xScale = (low, high, width = WIDTH) => scale(low, high, LEFT, width - RIGHT);
  const yScale = (low, high, height = HEIGHT) => scale(low, high, height - BOTTOM, TOP);

  function ticks({low, high}, count = 6) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw * 0.999), found = [];
    for (let index = Math.ceil(low / step - 1e-9); index <= Math.floor(high / step + 1e-9); index++) found.push(index * step);
    return found;
  }

  const line = (x1, y1, x2, y2, kind) => make("line", {x1, y1, x2, y2, class: kind});
  const text = (x, y, words, kind = "tick", anchor = "middle") => make("text", {x, y, class: kind, "text-anchor": anchor}, words);
  const titled = (node, words) => (words && node.append(make("title", {}, words)), node);
  const rect = (x, y, width, height, kind, words) =>
    titled(make("rect", {x, y, width: Math.max(0, width), height: Math.max(0, height), class: kind}), words);
  const circle = (cx, cy, r, kind, words) => titled(make("circle", {cx, cy, r, class: kind}), words);
  const path = (points, kind) =>
    make("path", {class: kind, d: points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(" ")});

  function axes(x, y, xLabel, yLabel) {
    const parts = [];
    for (const value of ticks(y)) {
      parts.push(line(x.start, y(value), x.end, y(value), "grid"), text(x.start - 6, y(value) + 4, short(value), "tick", "end"));
    }
    for (const value of ticks(x)) {
      parts.push(line(x(value), y.start, x(value), y.start + 4, "axis"), text(x(value), y.start + 17, short(value)));
    }
    const label = text(0, 0, yLabel, "label");
    label.setAttribute("transform", `translate(13 ${(y.start + y.end) / 2}) rotate(-90)`);
    parts.push(label, line(x.start, y.start, x.end, y.start, "axis"));
    parts.push(text((x.start + x.end) / 2, y.start + BOTTOM - 8, xLabel, "label"));
    return parts;
  }

  const svg = (parts, words, width = WIDTH, height = HEIGHT) =>
    make("svg", {viewBox: `0 0 ${width} ${height}`, role: "img"}, make("title", {}, words), ...parts);

  // Bars with names: [name, value, words, kind].
  function bars(title, rows) {
    const most = Math.max(...rows.map(row => row[1]), 1e-300), room = WIDTH - 150, parts = [];
    rows.forEach(([name, value, words, kind], index) => {
      const top = 6 + index * 36, width = Math.max(1, value / most * room);
      parts.push(text(0, top + 10, name, "label", "start"), rect(0, top + 15, width, 12, kind || "bar"));
      parts.push(text(width + 6, top + 25, words, "value", "start"));
    });
    const said = rows.map(row => `${row[0]}: ${row[2]}`).join("; ");
    return svg(parts, `${title}: ${said}`, WIDTH, 12 + 36 * rows.length);
  }

  // One bar of parts with a legend: [name, size, kind].
  function stack(title, parts, total, words) {
    const drawn = [], room = WIDTH - 2;
    let at = 1;
    parts.forEach(([name, size, kind], index) => {
      const width = size / total * room, row = 62 + index * 20;
      drawn.push(rect(at, 8, width, 30, kind, `${name}: ${words(size)}`));
      drawn.push(rect(1, row - 10, 12, 12, kind), text(20, row, name, "label", "start"));
      drawn.push(text(WIDTH - 4, row, `${words(size)}, ${percent(size / total, 1)}`, "value", "end"));
      at += width;
    });
    drawn.push(make("rect", {x: 1, y: 8, width: room, height: 30, class: "frame"}));
    const said = parts.map(([name, size]) => `${name} ${words(size)}`).join("; ");
    return svg(drawn, `${title}: ${said}`, WIDTH, 62 + parts.length * 20);
  }

  // Lines over an axis: {name, points, kind}; bound: {value, words}; mark: a point that is the state of the controls.
  function curves(title, lines, labels, {bound, mark, width = WIDTH, height = HEIGHT, fill} = {}) {
    const all = lines.flatMap(each => each.points);
    if (!all.length) return make("p", {class: "note"}, "Nothing to show.");
    let high = Math.max(...all.map(point => point[1]));
    if (bound && bound.value < 3 * high) high = Math.max(high, bound.value);
    const lowX = Math.min(0, ...all.map(point => point[0])), highX = Math.max(...all.map(point => point[0]));
    const x = xScale(lowX, highX > lowX ? highX * 1.02 : lowX + 1, width), y = yScale(0, high > 0 ? high * 1.08 : 1, height);
    const parts = axes(x, y, ...labels);
    if (bound && bound.value <= y.high) {
      parts.push(line(x.start, y(bound.value), x.end, y(bound.value), "limit"));
      const at = bound.atEnd ? x.end - 6 : x.start + 6;
      parts.push(text(at, y(bound.value) - 5, bound.words, "label", bound.atEnd ? "end" : "start"));
    }
    lines.forEach(({points, kind, name, dots}, index) => {
      const placed = points.map(([at, value]) => [x(at), y(value)]);
      if (fill && placed.length) {
        parts.push(path([[placed[0][0], y.start], ...placed, [placed[placed.length - 1][0], y.start]], `area ${kind}-area`));
      }
      parts.push(path(placed, `curve ${kind}-stroke`));
      for (const [at, value] of dots ? points : []) {
        parts.push(circle(x(at), y(value), 4, `${kind}-fill`, `${short(at)}, ${short(value)}`));
      }
      if (lines.length > 1) {
        const left = LEFT + index * Math.min(150, (width - LEFT) / lines.length);
        parts.push(line(left, 9, left + 22, 9, `curve ${kind}-stroke`), text(left + 28, 13, name, "label", "start"));
      }
    });
    if (mark) parts.push(make("circle", {cx: x(mark[0]), cy: y(mark[1]), r: 8, class: "chosen"}));
    const said = lines.map(each => `${each.name}: ${each.points.slice(0, 24).map(([a, b]) => `${short(a)}, ${short(b)}`).join("; ")}`);
    return svg(parts, `${title}: ${said.join(". ")}`, width, height);
  }

  // A table, in a region that scrolls; `chosen` is the row to mark.
  function table(caption, header, rows, {left = 1, chosen = -1} = {}) {
    const side = index => index < left ? {class: "left"} : {};
    const head = make("tr", {}, ...header.map((name, index) => make("th", {scope: "col", ...side(index)}, name)));
    const lines = rows.map((row, number) => make("tr", number === chosen ? {class: "chosen", "aria-current": "true"} : {},
      ...row.map((cell, index) => make(index ? "td" : "th", index ? side(index) : {scope: "row"}, String(cell)))));
    const body = make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...lines));
    return make("div", {class: "scroll", role: "region", tabindex: "0", "aria-label": caption}, body);
  }

  // A table that is folded: what a figure shows, in numbers.
  function folded(words, ...content) {
    return make("details", {}, make("summary", {}, words), ...content);
  }

  function facts(rows) {
    return make("dl", {class: "facts"}, ...Object.entries(rows).map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  // Fill a panel; what the reader has unfolded stays so.
  function fill(name, ...nodes) {
    const place = document.getElementById(name);
    const open = [...place.querySelectorAll("details")].map(each => each.open);
    place.replaceChildren(...nodes);
    place.querySelectorAll("details").forEach((each, index) => { each.open = open[index] || false; });
  }

  const show = (control, value) => control.tagName === "SELECT"
    ? control.options[control.selectedIndex].text
    : fixed(value, Number.isInteger(value) ? 0 : 2) + (control.dataset.unit ? ` ${control.dataset.unit}` : "");

  // Values of the controls by name. Each slider shows its value, and says it to a screen reader.
  function values(form) {
    const found = {};
    for (const control of form.querySelectorAll("input[data-values], select[data-values]")) {
      const all = JSON.parse(control.dataset.values);
      const value = all[control.tagName === "SELECT" ? control.selectedIndex : Number(control.value)];
      found[control.id] = value;
      const words = show(control, value);
      if (control.type === "range") {
        control.setAttribute("aria-valuetext", words);
        control.parentElement.querySelector("output").value = words;
      }
    }
    return found;
  }

  // Figures that no slider changes.
  for (const place of document.querySelectorAll("[data-chart]")) {
    const chart = JSON.parse(place.dataset.chart), title = place.closest("figure").querySelector("h3").textContent;
    place.append(chart.kind === "bars"
      ? bars(title, chart.rows.map(([name, value]) => [name, value, `${fixed(value, 1)} ${chart.unit}`]))
      : curves(title, [{name: title, kind: "candidate", dots: true, points: chart.points}], chart.labels));
  }

  const data = () => JSON.parse(document.getElementById("data").textContent);

  return {make, svg, line, text, rect, circle, path, axes, xScale, yScale, bars, stack, curves, table, folded, facts, fill,
    values, fixed, short, percent, bytes, data, WIDTH, HEIGHT};
})();
