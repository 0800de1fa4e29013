// The Stop button of a comparison: its cell runs on the kernel's main thread, where a click would wait for its end,
// so it asks on the control channel.

import { STOP_NOTES, stopRun } from "./stop.js";

function render({ model, el }) {
  const button = document.createElement("button");
  button.className = "lm-Widget jupyter-widgets jupyter-button widget-button"; // as ipywidgets draws its own
  button.style.width = "auto";
  let heard = () => {};
  const draw = () => {
    const off = model.get("disabled");
    if (off) heard(true);
    button.disabled = off;
    button.classList.toggle("mod-warning", !off);
    button.textContent = "Stop";
    button.title = model.get("hint");
  };
  button.addEventListener("click", async () => {
    button.disabled = true;
    button.textContent = "Stopping …";
    const viaComm = () => {
      model.send({ kind: "stop" });
      return new Promise((resolve) => (heard = resolve));
    };
    const answer = await stopRun(model.widget_manager?.kernel, model.get("run_key"), viaComm);
    if (answer === "unreachable") draw();
    button.title = STOP_NOTES[answer];
  });
  model.on("change:disabled", draw);
  draw();
  el.append(button);
  return () => model.off("change:disabled", draw);
}

export default { render };
