"use strict";
// The cockpit: the positions of the sliders go to the server, which simulates them and sends what it has so far.
(() => {
  const {fixed, percent, short} = drawing, form = document.querySelector("form.controls");
  const said = drawing.make("p", {id: "said", class: "note", role: "status"}), ms = seconds => fixed(seconds * 1e3, 1);
  let control = null, waiting = 0, before = null, last = null;

  // Means of a bin: a sum over another, where there is any.
  function means(run, sum, count) {
    return run.series[sum].map((value, at) => [(at + 0.5) * run.width, value * 1e3 / run.series[count][at], run.series[count][at]])
      .filter(point => point[2] > 0);
  }

  function drawMeans(run, name, title, sum, count) {
    const points = means(run, sum, count);
    drawing.fill(name, drawing.curves(title, [{name: title, kind: "candidate", points}], ["Seconds", "ms"]),
      drawing.folded("As a table", drawing.table(`${title}, mean of each bin of ${short(run.width)} s.`, ["Seconds", "ms", "of"],
        points.map(([at, value, number]) => [fixed(at, 2), fixed(value, 2), fixed(number)]))));
  }

  function drawRun(frame) {
    const run = frame.run;
    if (!run.series.busy.length) return;
    timelines.load(run);
    drawMeans(run, "ttft", "Time to first token", "ttft", "first_tokens");
    drawMeans(run, "itl", "Time between tokens", "itl", "output_tokens");
  }

  const FIGURES = {
    "Goodput, requests/s": one => fixed(one.goodput, 2),
    "Requests that keep the level": one => percent(one.good_share, 1),
    "TTFT p50, ms": one => ms(one.ttft.p50),
    "TTFT p99, ms": one => ms(one.ttft.p99),
    "TPOT p50, ms": one => ms(one.tpot.p50),
    "ITL p99, ms": one => ms(one.itl_p99),
    "Queue p99, ms": one => ms(one.queue.p99),
    "Output, tokens/s": one => fixed(one.output_tokens_per_second),
    "Utilization": one => percent(one.busy_share),
    "Tokens of a step": one => fixed(one.mean_batch, 1),
    "Prompt tokens cached": one => percent(one.cached_share, 1),
    "Preemptions": one => fixed(one.num_preemptions),
    "Queue": one => one.is_saturated ? "grows without bound" : "bounded",
  };

  function drawOutcome() {
    if (!last) return;
    const rows = Object.entries(FIGURES).map(([name, words]) => [name, words(last), before ? words(before) : "-"]);
    drawing.fill("outcome", drawing.table("Figures of the run.", ["Figure", "This run", "The one before"], rows));
  }

  function take(frame) {
    if (frame.run) drawRun(frame);
    if (frame.figures) {
      [before, last] = [last, frame.figures];
      drawOutcome();
      said.textContent = `Simulated: ${fixed(frame.figures.num_requests)} requests in ${fixed(frame.figures.seconds, 1)} s, computed in ${fixed(frame.seconds, 2)} s.`;
      document.body.dataset.state = "done";
    } else if (frame.error) {
      said.textContent = frame.error;
      document.body.dataset.state = "failed";
    } else {
      said.textContent = `Simulating: ${fixed(frame.ended)} of ${fixed(frame.requests)} requests have ended.`;
    }
  }

  async function simulate() {
    if (control) control.abort();
    const mine = control = new AbortController();
    document.body.dataset.state = "running";
    try {
      const answer = await fetch("run", {method: "POST", body: JSON.stringify(drawing.values(form)), signal: mine.signal,
        headers: {"content-type": "application/json"}});
      if (!answer.ok) return take(await answer.json());
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "";;) {
        const {value, done} = await reader.read();
        if (done || mine !== control) return;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        lines.forEach(each => take(JSON.parse(each)));
      }
    } catch (error) {
      if (error.name !== "AbortError") take({error: "The server does not answer: it has been stopped."});
    }
  }

  form.append(said);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", () => {
    drawing.values(form);
    clearTimeout(waiting);
    waiting = setTimeout(simulate, 200);
  });
  drawing.values(form);
  simulate();
})();
