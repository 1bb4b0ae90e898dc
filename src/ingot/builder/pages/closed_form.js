"use strict";
// The closed form of ingot.planning in the browser: step_model.py, load.py, latency.py, formulas.py and parallelism.py,
// with the coefficients that the page has. A test compares its figures with Python's.
const closedForm = (() => {
  const COUNTS = {
    steps: () => 1,
    rows: step => step.prefill_tokens + step.decode_rows + step.draft_rows,
  };
  const FIELDS = ["prefill_tokens", "prefill_context_tokens", "decode_rows", "context_tokens", "draft_rows", "num_sequences"];

  const stepOf = counts => Object.fromEntries(FIELDS.map(name => [name, counts[name] || 0]));
  const joined = (one, other) => Object.fromEntries(FIELDS.map(name => [name, one[name] + other[name]]));

  // The share of a whole that a count reaches: the logarithm of the rest is linear between the pairs, and after them.
  function reached(reach, count) {
    let [origin, missed, slope] = [0, 0, 0];
    for (const [end, share] of reach) {
      const after = Math.log1p(-share);
      slope = (after - missed) / (end - origin);
      if (count <= end) break;
      [origin, missed] = [end, after];
    }
    return -Math.expm1(missed + slope * (count - origin));
  }

  function useSeconds([resource, name, seconds, reach], step) {
    const count = name in COUNTS ? COUNTS[name](step) : step[name] || 0;
    return seconds * (reach.length ? reached(reach, count) : count);
  }

  // A term's seconds are those of its slowest resource; uses of one resource add up.
  function termSeconds([name, uses], step) {
    const totals = new Map();
    for (const use of uses) totals.set(use[0], (totals.get(use[0]) || 0) + useSeconds(use, step));
    let [resource, seconds] = ["", -1];
    for (const [each, total] of totals) if (total > seconds) [resource, seconds] = [each, total];
    return {name, resource, seconds};
  }

  const terms = (model, step) => model.map(term => termSeconds(term, step));
  const seconds = (model, step) => terms(model, step).reduce((sum, term) => sum + term.seconds, 0);

  const acceptedTokens = (acceptance, drafted) =>
    acceptance >= 1 ? drafted + 1 : (1 - acceptance ** (drafted + 1)) / (1 - acceptance);

  const computedTokens = load => load.prompt - load.cached;

  function prefillStep(load, prompts) {
    const computed = computedTokens(load);
    return stepOf({
      prefill_tokens: prompts * computed,
      prefill_context_tokens: prompts * (computed * (load.cached + (computed + 1) / 2)),
      num_sequences: prompts,
    });
  }

  function decodeStep(load, rows) {
    return stepOf({
      decode_rows: rows,
      context_tokens: rows * (load.prompt + load.output / 2),
      draft_rows: rows * load.drafted,
      num_sequences: rows,
    });
  }

  const stepTokens = load => acceptedTokens(load.acceptance, load.drafted);
  const averageStep = (load, rows) =>
    joined(prefillStep(load, rows * stepTokens(load) / load.output), decodeStep(load, rows));

  // The step model of a way to share the model; a pipeline has as many microbatches as stages, or requests if fewer.
  const modelOf = (way, load) => way.models[Math.min(way.models.length, load.concurrency) - 1];

  const blocksOf = (plan, load) => Math.ceil((load.prompt + load.output) / plan.block_tokens);
  const sequenceBytes = (plan, load) => blocksOf(plan, load) * plan.block_bytes + plan.state_bytes;

  function fitting(plan, way, load) {
    const blocks = blocksOf(plan, load);
    if (way.blocks === null) return way.kv_bytes / sequenceBytes(plan, load);
    const sequences = Math.floor(way.blocks / blocks);
    return plan.state_bytes ? Math.min(sequences, way.state_slots) : sequences;
  }

  // Sequences that run at a time: those that fit, up to a step's most.
  const mostSequences = (plan, way, load) => Math.min(fitting(plan, way, load), plan.max_sequences);

  const times = (load, running, ttft, tpot, itl) => ({
    load, running, ttft, tpot, itl,
    endToEnd: ttft + (load.output - 1) * tpot,
    tokensPerSecond: running / tpot,
    requestsPerSecond: running / tpot / load.output,
  });

  function predict(model, load, most) {
    const running = Math.min(load.concurrency, most);
    const tpot = seconds(model, averageStep(load, running)) / stepTokens(load);
    const first = seconds(model, joined(prefillStep(load, 1), decodeStep(load, Math.max(0, running - 1))));
    const wait = Math.max(0, load.concurrency - running) / running * (first + (load.output - 1) * tpot);
    const itl = seconds(model, decodeStep(load, running)) / stepTokens(load);
    return times(load, running, wait + first, tpot, itl);
  }

  // Null where the devices do not hold one sequence.
  function latency(plan, way, load) {
    const most = mostSequences(plan, way, load);
    return most >= 1 ? predict(modelOf(way, load), load, most) : null;
  }

  function sweep(plan, way, load) {
    const most = mostSequences(plan, way, load), counts = [];
    for (let count = 1; count <= Math.max(1, most); count *= 2) counts.push(count);
    if (counts[counts.length - 1] < Math.floor(most)) counts.push(Math.floor(most));
    return most < 1 ? [] : counts.map(concurrency => latency(plan, way, {...load, concurrency}));
  }

  // A batch that others join only once all of it has ended; its longest output has so many times the mean's tokens.
  function predictStatic(model, load, most, longest) {
    const running = Math.min(load.concurrency, most);
    const itl = seconds(model, decodeStep(load, running / longest)) / stepTokens(load);
    const batch = seconds(model, prefillStep(load, running)) + (longest * load.output - 1) * itl;
    const rate = running / batch, endToEnd = load.concurrency / rate;
    return {
      load, running, itl, endToEnd, tpot: itl, ttft: endToEnd - (load.output - 1) * itl,
      tokensPerSecond: rate * load.output, requestsPerSecond: rate,
    };
  }

  // The speedup of drafts over plain decoding at so many rows, where one drafted token costs a share of a plain step.
  function speculation(model, load, rows, cost) {
    const plain = seconds(model, decodeStep({...load, drafted: 0}, rows));
    const verifying = seconds(model, decodeStep(load, rows));
    const tau = stepTokens(load);
    return {tau, plain, verifying, speedup: tau * plain / (verifying + load.drafted * cost * plain)};
  }

  function linkShare(model, step) {
    const all = terms(model, step), link = all.filter(term => term.resource === "link");
    const sum = list => list.reduce((total, term) => total + term.seconds, 0);
    return sum(link) / sum(all);
  }

  return {terms, seconds, averageStep, decodeStep, sequenceBytes, fitting, mostSequences, latency, sweep, predictStatic, speculation, linkShare, modelOf};
})();
