"use strict";
// Timelines of a simulated run: what was recorded of it, over virtual time. A slider chooses a moment.
const timelines = (() => {
  const {make, fixed, short, percent, line, rect, text, xScale, yScale, curves, table, folded, facts, fill} = drawing;
  const WIDE = 900, KINDS = {queued: "undecided-soft", prompt: "candidate-fill", decode: "pass-soft", stopped: "fail-soft"};
  const WORDS = {queued: "waits", prompt: "prompt computed", decode: "decodes", stopped: "preempted, waits again"};

  // Mean amounts of each bin: per second, or the average over the bin's time.
  function points(run, name) {
    const found = run.series[name].map((sum, at) => [(at + 0.5) * run.width, sum / run.width]);
    return found.length > 1 ? found.slice(0, -1) : found;
  }
  function cursor(node, run, moment, width = drawing.WIDTH, height = drawing.HEIGHT) {
    if (node.tagName !== "svg" || moment === undefined) return node;
    const high = (points(run, "busy").slice(-1)[0] || [1])[0] * 1.02, x = xScale(0, high, width);
    if (moment <= high) node.append(line(x(moment), 26, x(moment), height - 46, "cursor"));
    return node;
  }

  function overTime(run, title, lines, label, moment, options = {}) {
    const drawn = lines.map(([name, words, kind]) => ({name: words, kind, points: points(run, name)}));
    const every = Math.ceil(drawn[0].points.length / 40);
    const rows = drawn[0].points.map((point, at) => [fixed(point[0], 2), ...drawn.map(each => fixed(each.points[at][1], 1))]);
    return [cursor(curves(title, drawn, ["Seconds", label], options), run, moment), folded("As a table",
      table(`${title}${every > 1 ? `, each ${every}th bin of ${short(run.width)} s` : ""}.`, ["Seconds", ...lines.map(each => each[1])],
        rows.filter((_, at) => at % every === 0)))];
  }

  // Spans of one request, with what lies in between: it waits, at first for a place and later after a preemption.
  function spansOf(request) {
    const found = [];
    let at = request.arrival;
    for (const [kind, begin, end, tokens, replica] of request.spans) {
      if (begin - at > 1e-6) found.push([found.length ? "stopped" : "queued", at, begin, 0, replica]);
      found.push([kind, begin, end, tokens, replica]);
      at = end;
    }
    if (!request.spans.length && request.finish !== null) found.push(["queued", at, request.finish, 0, 0]);
    return found;
  }

  function legend(kinds, names, width) {
    return kinds.flatMap((kind, index) => {
      const left = 62 + index * 175;
      return left + 150 > width ? [] : [rect(left, 2, 12, 12, kind), text(left + 18, 13, names[index], "label", "start")];
    });
  }

  function lifeOf(run, waits) {
    const requests = run.requests, row = 15;
    if (!requests.length) return [make("p", {class: "note"}, "No request was computed.")];
    const names = {...WORDS, stopped: waits}, all = requests.map(spansOf);
    const begin = Math.min(...requests.map(each => each.arrival)), end = Math.max(...all.flat().map(span => span[2]), begin + 1e-6);
    const x = Object.assign(at => 62 + (at - begin) / (end - begin) * (WIDE - 76), {low: begin, high: end, start: 62, end: WIDE - 14});
    const height = 26 + row * requests.length + 46, y = {start: height - 46, end: 26, low: 0, high: 1};
    const parts = legend(Object.values(KINDS), Object.values(names), WIDE);
    requests.forEach((request, index) => {
      const top = 26 + index * row;
      parts.push(text(56, top + 11, String(request.line), "tick", "end"));
      for (const [kind, from, to, tokens, replica] of all[index]) {
        const said = `request ${request.line} ${names[kind]}${tokens ? `, ${tokens} tokens, replica ${replica}` : ""}: ${fixed(from, 3)} to ${fixed(to, 3)} s`;
        parts.push(rect(x(from), top + 2, Math.max(0.7, x(to) - x(from)), row - 4, KINDS[kind], said));
      }
    });
    const step = (end - begin) / 6;
    for (let at = begin; at <= end + step / 100; at += step) parts.push(text(x(at), y.start + 17, fixed(at, end < 10 ? 2 : 1)));
    parts.push(line(x.start, y.start, x.end, y.start, "axis"), text((x.start + x.end) / 2, height - 8, "Seconds", "label"));
    const rows = requests.map((request, index) => {
      const sum = kind => all[index].filter(span => span[0] === kind).reduce((total, span) => total + span[2] - span[1], 0);
      const chunks = all[index].filter(span => span[0] === "prompt").length;
      return [request.line, request.prompt_tokens, request.cached_tokens, request.output_tokens, fixed(request.arrival, 2), fixed(sum("queued") * 1e3, 1),
        chunks, fixed(sum("prompt") * 1e3, 1), fixed(sum("decode") * 1e3, 1), request.preemptions, fixed(sum("stopped") * 1e3, 1),
        request.is_whole ? request.reason : `${request.reason}; its later spans are left out`];
    });
    const kept = run.num_kept < run.num_requests ? ` of the first ${fixed(run.num_kept)}, whose times are kept` : "";
    const span = `Requests ${requests[0].line} to ${requests[requests.length - 1].line}`;
    const node = drawing.svg(parts, `${span}: when each waits, is computed and decodes; the table has the same.`, WIDE, height);
    node.classList.add("broad");
    return [make("p", {class: "note"}, `${span} of ${fixed(run.num_requests)}: those with the most preemptions and the longest waits${kept}.`),
      make("div", {class: "scroll", role: "region", tabindex: "0", "aria-label": "Life of requests"}, node),
      folded("As a table", table("Times of these requests; waiting, prompt and decoding in milliseconds.",
        ["Request", "Prompt", "Cached", "Output", "Arrives, s", "Waits", "Chunks", "Prompt ms", "Decoding", "Preempted", "Waits again", "End"], rows))];
  }

  function steps(run) {
    if (!run.steps.length) return [make("p", {class: "note"}, "No step was made.")];
    const first = run.steps[0][0], last = run.steps[run.steps.length - 1][1], tokens = run.steps.map(([, , count, prompt, output]) => (prompt + output) / count);
    const x = xScale(first, last > first ? last : first + 1), y = yScale(0, Math.max(...tokens) * 1.05 || 1), parts = drawing.axes(x, y, "Seconds", "Tokens of a step");
    parts.push(...legend(["candidate-fill", "pass-fill"], ["prompts", "decoding"], drawing.WIDTH));
    for (const [begin, end, count, prompt, output] of run.steps) {
      const width = Math.max(0.5, x(end) - x(begin) - 0.3), low = y(output / count), high = y((prompt + output) / count);
      const said = `${count} steps from ${fixed(begin, 3)} s: ${fixed(prompt / count)} tokens of prompts, ${fixed(output / count)} decoded in each`;
      parts.push(rect(x(begin), low, width, y.start - low, "pass-fill", said), rect(x(begin), high, width, low - high, "candidate-fill", said));
    }
    const shown = run.steps.reduce((total, step) => total + step[2], 0);
    return [drawing.svg(parts, `Tokens of the first ${shown} steps of the first replica; the table has the same.`),
      make("p", {class: "note"}, `The first ${fixed(shown)} steps of the first replica; all replicas made ${fixed(run.num_steps)}. A bar is a step, or equal steps of decoding.`),
      folded("As a table", table("Steps of the first replica.", ["Begins, s", "Steps", "Takes, ms", "Prompt tokens", "Decoded"], run.steps.map(([begin, end, count, prompt, output]) =>
        [fixed(begin, 4), count, fixed((end - begin) * 1e3, 2), prompt, output])))];
  }

  // Numbers in order, with what follows by one joined: 3-7 9.
  function ranges(numbers) {
    const found = [];
    for (const number of numbers) {
      const last = found[found.length - 1];
      if (last && last[1] + 1 === number) last[1] = number; else found.push([number, number]);
    }
    return found.map(([first, last]) => first === last ? first : `${first}-${last}`).join(" ");
  }

  function blockTable(run, index) {
    const moment = run.moments[index];
    if (!moment) return [make("p", {class: "note"}, "No step was made.")];
    const columns = 40, size = 10, cells = [...moment.cells], height = 16 + Math.ceil(cells.length / columns) * size;
    const parts = cells.map((digit, at) => {
      const node = rect(at % columns * size + 1, 8 + Math.floor(at / columns) * size, size - 1.5, size - 1.5, "cell");
      node.setAttribute("fill-opacity", 0.08 + Number(digit) / 9 * 0.92);
      return node;
    });
    const used = cells.reduce((sum, digit) => sum + Number(digit), 0) / (9 * cells.length);
    const rows = moment.tables.map(([sequence, count, blocks]) => [`sequence ${sequence}`, count, ranges(blocks) + (count > blocks.length ? " ..." : "")]);
    const rest = moment.sequences - rows.length;
    return [facts({Moment: `${fixed(moment.seconds, 3)} s`, Running: fixed(moment.sequences), Waiting: fixed(moment.waiting)}),
      drawing.svg(parts, `The pool of the first replica at ${fixed(moment.seconds, 3)} s: about ${percent(used)} of its cells in use; the darker a cell, the more of its blocks.`, 402, height),
      table(`Blocks of the ${rows.length} longest sequences${rest > 0 ? `; left out: ${rest}` : ""}.`, ["Sequence", "Blocks", "Their numbers, in the order of the tokens"], rows)];
  }

  // What the pages of a run and the cockpit both show.
  function load(run, moment) {
    const show = (name, ...rest) => fill(name, ...overTime(run, ...rest));
    show("tokens", "Tokens computed", [["output_tokens", "decoding", "pass"], ["prompt_tokens", "prompts", "candidate"]], "Tokens/s", moment);
    show("sequences", "Sequences", [["running", "running", "candidate"], ["waiting", "waiting", "fail"]], "Sequences", moment);
    show("pool", "KV blocks", [["blocks", "in use", "candidate"], ["cached_blocks", "idle, kept for prefixes", "baseline"]], "Blocks",
      moment, {bound: {value: run.blocks, words: `${fixed(run.blocks)} blocks`}});
    show("utilization", "Engines that compute", [["busy", "busy", "candidate"]], "Engines", moment, {fill: true});
  }

  function draw(run, index) {
    const moment = (run.moments[index] || {}).seconds, waits = run.is_split ? "moves, or waits again" : WORDS.stopped;
    fill("life", ...lifeOf(run, waits));
    load(run, moment);
    const found = [["hit_tokens", "found in the pool", "pass"], ["prompt_tokens", "computed", "candidate"]];
    if (run.series.restored_tokens.some(Boolean)) found.push(["restored_tokens", "from the host", "baseline"]);
    fill("prefix", ...overTime(run, "Tokens of prompts", found, "Tokens/s", moment));
    fill("steps-panel", ...steps(run));
    fill("table-panel", ...blockTable(run, index));
  }

  return {draw, load};
})();
