// What runs in a cell of its own: a comparison, a climb. Its cell keeps the kernel's main thread, where a click would
// wait for its end, so Stop asks on the control channel. The HTML that says the same below is hidden.

import { element } from "./dom.js";
import { Running } from "./running.js";
import { isDark, watchTheme } from "./theme.js";

function render({ model, el }) {
  const root = element("div", "gp-bench gp-plain", el);
  element("style", "", root, model.get("css"));
  const twin = element("style", "", document.head, `.gpulab-twin-${model.get("run_key")} { display: none; }`);
  const running = new Running(root, model, model.get("hint"), () => model.send({ kind: "stop" }));
  const draw = () => running.draw(true);
  const theme = () => (root.dataset.theme = isDark() ? "dark" : "light");
  const endTheme = watchTheme(theme);
  model.on("change:status", draw);
  theme();
  running.draw(false);
  return () => {
    model.off("change:status", draw);
    endTheme();
    running.end();
    twin.remove();
  };
}

export default { render };
