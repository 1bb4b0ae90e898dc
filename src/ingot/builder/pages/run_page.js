"use strict";
// The page of one simulated run: the slider of its timelines, and a button that moves it.
(() => {
  const form = document.querySelector("form.controls"), {run} = drawing.data();
  if (!form) return;
  const slider = document.getElementById("moment"), play = drawing.make("button", {type: "button"}, "Play");
  const draw = () => { drawing.values(form); timelines.draw(run, Number(slider.value)); };
  let timer = 0;
  const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
  play.addEventListener("click", () => {
    if (timer) return stop();
    play.textContent = "Stop";
    if (slider.value === slider.max) slider.value = 0;
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      draw();
      if (slider.value === slider.max) stop();
    }, 500);
  });
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) form.append(play);
  form.addEventListener("input", () => { if (timer) stop(); draw(); });
  form.addEventListener("submit", event => event.preventDefault());
  draw();
})();
