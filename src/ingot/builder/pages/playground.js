"use strict";
// The playground of a plan: sliders over the closed form, and what follows from them.
(() => {
  const {fixed, short, percent, bytes} = drawing, {plan} = drawing.data(), form = document.querySelector("form.controls");
  const ms = (seconds, digits = 2) => fixed(seconds * 1e3, digits);
  const TIMES = ["TTFT ms", "TPOT ms", "ITL ms", "Tokens/s", "Requests/s"];
  const cells = one => one
    ? [ms(one.ttft, 0), ms(one.tpot), ms(one.itl), fixed(one.tokensPerSecond), fixed(one.requestsPerSecond, 2)]
    : ["does not fit", "", "", "", ""];

  function loadOf(chosen) {
    const prompt = Math.min(chosen.prompt, plan.context_tokens - 1), output = Math.min(chosen.output, plan.context_tokens - prompt);
    const cached = Math.min(prompt - 1, Math.floor(prompt * chosen.cached / 100));
    return {concurrency: chosen.concurrency, prompt, output, cached, drafted: chosen.drafted, acceptance: chosen.acceptance / 100};
  }

  function failures(one) {
    const names = {ttft: "TTFT", tpot: "TPOT", endToEnd: "end to end"}, high = 1 + plan.relative_error;
    return Object.entries(names).filter(([key]) => plan.level && plan.level[key] !== null && one[key] * high > plan.level[key])
      .map(([key, name]) => `${name} of up to ${ms(one[key] * high, 1)} ms is above ${ms(plan.level[key], 0)} ms`);
  }

  function drawLatency(way, load, found) {
    if (!found) return drawing.fill("latency", drawing.make("p", {class: "absent"}, `${way.words} do not hold the model and one such sequence.`));
    const model = closedForm.modelOf(way, load);
    const terms = closedForm.terms(model, closedForm.averageStep(load, found.running)).filter(term => term.seconds > 0)
      .sort((one, other) => other.seconds - one.seconds);
    const step = terms.reduce((sum, term) => sum + term.seconds, 0), missed = failures(found);
    const shown = terms.slice(0, 6), rest = terms.slice(6).reduce((sum, term) => sum + term.seconds, 0);
    const rows = shown.map(term => [`${term.name}, ${term.resource}`, term.seconds * 1e3, `${ms(term.seconds)} ms`]);
    if (rest > 0) rows.push(["all others", rest * 1e3, `${ms(rest)} ms`]);
    drawing.fill("latency", drawing.facts({
      TTFT: `${ms(found.ttft, 1)} ms`, TPOT: `${ms(found.tpot)} ms`, ITL: `${ms(found.itl)} ms`,
      "End to end": `${fixed(found.endToEnd, 2)} s`, Throughput: `${fixed(found.tokensPerSecond)} tokens/s`,
      "Running, waiting": `${fixed(found.running, found.running % 1 ? 1 : 0)}, ${fixed(load.concurrency - found.running, found.running % 1 ? 1 : 0)}`,
      "Bound by": `${terms[0].resource} in ${terms[0].name}, ${percent(terms[0].seconds / step)} of a step`,
      ...(plan.level ? {"Service level": missed.length ? missed[0] : "met at the upper end of the interval"} : {}),
    }), drawing.bars("Terms of the average step", rows));
    document.getElementById("said").textContent =
      `TTFT ${ms(found.ttft, 0)} ms, TPOT ${ms(found.tpot)} ms, ${fixed(found.tokensPerSecond)} tokens a second`;
  }

  function drawMemory(way, load, found) {
    const sequence = closedForm.sequenceBytes(plan, load);
    const fits = closedForm.fitting(plan, way, load), running = found ? found.running : 0, total = plan.memory_bytes;
    const fixedParts = [["weights", way.weights, "candidate-fill"], ["arena", way.arena, "undecided-fill"],
      ["context, graphs and other", way.other, "baseline-fill"]];
    const taken = fixedParts.reduce((sum, part) => sum + part[1], 0);
    const pool = way.blocks === null ? Math.max(0, total - taken) : way.blocks * plan.block_bytes + way.states;
    const used = Math.min(pool, running * sequence * way.copies / way.devices);
    const parts = [...fixedParts, ["KV in use", used, "pass-fill"], ["KV pool, free", pool - used, "pass-soft"],
      ["left", Math.max(0, total - taken - pool), "space"]].filter(part => part[1] > 0);
    drawing.fill("memory-panel", drawing.facts({
      "A sequence": bytes(sequence), "Sequences that fit": fixed(fits, way.blocks === null ? 1 : 0),
      "Most in a step": fixed(plan.max_sequences), "Devices": fixed(way.devices),
    }), drawing.stack("Memory of one device", parts, Math.max(total, taken), bytes));
  }

  function drawCurve(way, load, found) {
    const points = closedForm.sweep(plan, way, load);
    const lines = [{name: "TPOT", kind: "candidate", dots: true, points: points.map(one => [one.tokensPerSecond, one.tpot * 1e3])}];
    const bound = plan.level && plan.level.tpot !== null ? {value: plan.level.tpot * 1e3, words: `bound ${ms(plan.level.tpot, 0)} ms`} : null;
    const rows = points.map(one => [fixed(one.load.concurrency), ...cells(one)]);
    drawing.fill("curve", drawing.curves("Throughput against latency", lines, ["Tokens/s", "TPOT, ms"],
      {bound, mark: found && [found.tokensPerSecond, found.tpot * 1e3]}),
    drawing.folded("As a table", drawing.table("Other numbers of requests at a time.", ["At a time", ...TIMES], rows)));
  }

  function drawWays(chosen, load) {
    const rows = plan.ways.map(way => {
      const found = closedForm.latency(plan, way, load);
      const share = found ? closedForm.linkShare(closedForm.modelOf(way, load), closedForm.averageStep(load, found.running)) : 0;
      return {way, found, cells: [way.words, fixed(closedForm.fitting(plan, way, load)), ...(found
        ? [ms(found.ttft, 0), ms(found.tpot), fixed(found.tokensPerSecond), fixed(found.tokensPerSecond / way.devices), percent(share, 1)]
        : ["does not fit", "", "", "", ""])]};
    });
    const shown = rows.filter(row => row.found).map(row =>
      [row.way.words, row.found.tokensPerSecond, `${fixed(row.found.tokensPerSecond)} tokens/s`, row.way === chosen ? "candidate-fill" : "bar"]);
    drawing.fill("ways", ...(shown.length ? [drawing.bars("Throughput of ways to share the model", shown)] : []),
      drawing.table("Every way to share the model; sending is the share of the step in which links bind.",
        ["Devices", "Sequences fit", "TTFT ms", "TPOT ms", "Tokens/s", "of a device", "Sending"],
        rows.map(row => row.cells), {chosen: rows.findIndex(row => row.way === chosen)}));
  }

  function drawSpeculation(way, load, found, cost) {
    if (!found) return drawing.fill("speculation");
    const model = closedForm.modelOf(way, load), drafted = [...Array(17).keys()];
    const one = closedForm.speculation(model, load, found.running, cost);
    const at = (rows, kind, name) => ({name, kind, points: drafted.map(count =>
      [count, closedForm.speculation(model, {...load, drafted: count}, rows, cost).speedup])});
    const lines = [at(found.running, "candidate", `${fixed(found.running)} running`)];
    if (found.running > 1) lines.push(at(1, "baseline", "alone"));
    const acceptance = percent(load.acceptance);
    drawing.fill("speculation", drawing.facts({
      "Tokens of a step": fixed(one.tau, 2), "Speedup": `${fixed(one.speedup, 2)}x`,
      "Plain step": `${ms(one.plain)} ms`, "Verifying step": `${ms(one.verifying)} ms`,
    }), drawing.curves(`Speedup of decoding at an acceptance of ${acceptance}`, lines, ["Drafted tokens", "Speedup"],
      {bound: {value: 1, words: "plain decoding", atEnd: true}, mark: [load.drafted, one.speedup]}),
    drawing.folded("As a table", drawing.table("Speedup of decoding by drafted tokens.", ["Drafted", ...lines.map(each => each.name)],
      drafted.map(count => [count, ...lines.map(each => `${fixed(each.points[count][1], 2)}x`)]))));
  }

  function drawBatching(way, load, found, longest) {
    if (!found) return drawing.fill("batching");
    const model = closedForm.modelOf(way, load), most = closedForm.mostSequences(plan, way, load);
    const ways = [["one at a time", closedForm.predictStatic(model, load, 1, 1)],
      ["static batches", closedForm.predictStatic(model, load, most, longest)], ["continuous", found]];
    drawing.fill("batching", drawing.bars("Throughput by batching", ways.map(([name, one]) =>
      [name, one.tokensPerSecond, `${fixed(one.tokensPerSecond)} tokens/s`, one === found ? "candidate-fill" : "bar"])),
    drawing.table("Batching of this load.", ["Batching", "TTFT ms", "TPOT ms", "Tokens/s"],
      ways.map(([name, one]) => [name, ms(one.ttft, 0), ms(one.tpot), fixed(one.tokensPerSecond)]), {chosen: 2}));
  }

  function drawLevels(way, load) {
    const sequence = closedForm.sequenceBytes(plan, load);
    drawing.fill("levels", drawing.bars("A sequence's KV by level of memory", plan.levels.map(([name, speed]) =>
      [name, sequence / speed, `${ms(sequence / speed)} ms`])),
    drawing.table("Time to read from each level, by the data sheet.", ["Level", "GB/s", "A sequence's KV, ms", "Weights, ms"],
      plan.levels.map(([name, speed]) => [name, fixed(speed / 1e9), ms(sequence / speed), ms(way.weights / speed)])));
  }

  function draw() {
    const chosen = drawing.values(form), way = plan.ways[chosen.way], load = loadOf(chosen);
    const found = closedForm.latency(plan, way, load);
    drawLatency(way, load, found);
    drawMemory(way, load, found);
    drawCurve(way, load, found);
    drawWays(way, load);
    drawSpeculation(way, load, found, chosen.cost / 100);
    drawBatching(way, load, found, chosen.longest);
    drawLevels(way, load);
    illustrations.tokenLoop(found, chosen.temperature, chosen.top / 100);
    illustrations.attentionTiles(plan, load);
  }

  form.append(drawing.make("p", {id: "said", class: "note", role: "status"}));
  form.addEventListener("input", draw);
  form.addEventListener("submit", event => event.preventDefault());
  draw();
})();
