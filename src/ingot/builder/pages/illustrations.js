"use strict";
// Two illustrations on a plan's page: how one token follows another, and which tiles attention computes. The scores of the
// tokens are made up; the times and the sizes are the plan's.
const illustrations = (() => {
  const {make, fixed, bytes, rect, text, svg, facts, bars, table, folded, fill} = drawing;
  const WORDS = ["the", "a", "its", "this", "every", "no", "one", "blue"], SCORES = [3.1, 2.4, 1.7, 1.3, 0.9, 0.2, -0.6, -1.4];
  const MOST_TOKENS = 12, MOST_TILES = 24;
  const chosen = [];
  let redraw = () => {};

  // Chances of the tokens that temperature and top-p leave, as runtime/truncation_sampling.py defines them.
  function chances(temperature, topP) {
    if (!temperature) return SCORES.map((_, at) => at === 0 ? 1 : 0);
    const weights = SCORES.map(score => Math.exp((score - SCORES[0]) / temperature)), total = weights.reduce((a, b) => a + b);
    let before = 0;
    const kept = weights.map(weight => {
      const keeps = before < topP * total;
      before += weight;
      return keeps ? weight : 0;
    });
    const sum = kept.reduce((a, b) => a + b);
    return kept.map(weight => weight / sum);
  }

  // A fixed sequence in place of random numbers, so that the same moves show the same tokens.
  const uniform = count => (count * 0.6180339887498949 + 0.35) % 1;

  function choose(found, point) {
    let sum = 0;
    const at = found.findIndex(chance => (sum += chance) > point);
    return at < 0 ? found.length - 1 : at;
  }

  const button = (words, act) => {
    const node = make("button", {type: "button"}, words);
    node.addEventListener("click", () => { act(); redraw(); document.querySelector(`#token-loop button[data-act="${words}"]`).focus(); });
    node.dataset.act = words;
    return node;
  };

  function tokenLoop(found, temperature, topP) {
    redraw = () => tokenLoop(found, temperature, topP);
    const now = chances(temperature, topP);
    const add = () => { if (chosen.length < MOST_TOKENS) chosen.push([uniform(chosen.length), choose(now, uniform(chosen.length))]); };
    const rows = chosen.map(([point, at], index) => [index + 1, WORDS[at], fixed(point, 3), index ? "decodes the token before" : "computes the prompt",
      found ? fixed((found.ttft + index * found.tpot) * 1e3, 1) : "-"]);
    fill("token-loop", make("p", {class: "note"}, `Text so far: ${chosen.map(([, at]) => WORDS[at]).join(" ") || "none"}.`),
      make("p", {}, button("Next token", add), " ", button("Start over", () => { chosen.length = 0; })),
      bars("Chances of the next token", now.map((chance, at) => [WORDS[at], chance, `${fixed(chance * 100, 1)} %`, chance ? "candidate-fill" : "bar"])),
      folded("As a table", table(`Each step gives a token, at most ${MOST_TOKENS} here.`, ["Token", "Word", "Random number", "Its step", "At, ms"], rows, {left: 2})));
  }

  // Tiles [queries, keys] of a prompt: a query attends to itself and to what is before it, or to a window of that.
  function tiles(load, size, window) {
    const count = {computed: 0, masked: 0, outside: 0, skipped: 0}, found = [];
    for (let first = load.cached; first < load.prompt; first += size) {
      const last = Math.min(first + size, load.prompt) - 1, row = [];
      for (let key = 0; key < load.prompt; key += size) {
        const end = Math.min(key + size, load.prompt) - 1;
        const kind = key > last ? "skipped" : window && end <= first - window ? "outside"
          : end > first || (window && key <= last - window) ? "masked" : "computed";
        count[kind]++;
        row.push(kind);
      }
      found.push(row);
    }
    return {rows: found, count};
  }

  function attentionTiles(plan, load) {
    const blocks = Math.ceil(load.prompt / MOST_TILES / plan.block_tokens), size = Math.max(1, blocks) * plan.block_tokens;
    const {rows, count} = tiles(load, size, plan.window), columns = rows[0].length, side = Math.min(16, 400 / columns);
    const kinds = {computed: "candidate-fill", masked: "bar", outside: "undecided-soft", skipped: "space"};
    const parts = rows.flatMap((row, y) => row.map((kind, x) => rect(1 + x * side, 16 + y * side, side - 1, side - 1, kinds[kind])));
    parts.push(text(0, 11, "keys, from the first token on; queries downwards", "label", "start"));
    const naive = (load.prompt - load.cached) * load.prompt * plan.query_heads * 2, total = rows.length * columns;
    const did = count.computed + count.masked;
    fill("attention-tiles", facts({"A tile": `${size} x ${size} tokens`, "Tiles computed": `${fixed(did)} of ${fixed(total)}`,
      "Partly masked": fixed(count.masked), ...(plan.window ? {"Before the window": fixed(count.outside)} : {}), "A layer's scores, if stored": bytes(naive)}),
    svg(parts, `${did} of ${total} tiles of attention are computed, ${count.masked} of them with a mask.`, 402, 20 + rows.length * side));
  }

  return {tokenLoop, attentionTiles};
})();
