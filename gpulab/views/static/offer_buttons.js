// Makes the plain text of an offer alive: its buttons are hidden until a kernel stands behind them, and again when it
// closes them. No widget is displayed, so a saved notebook holds only the text.
function initialize({ model }) {
  const place = `.gpulab-offer-${model.get("key")}`;
  const style = document.createElement("style");
  style.textContent = `${place} button { display: inline-block !important; }`;
  document.head.append(style);
  const clicked = (event) => {
    const button = event.target.closest?.(`${place} button`);
    if (button) model.send({ kind: "offer", choice: button.value });
  };
  document.addEventListener("click", clicked);
  const gone = () => {
    style.remove();
    document.removeEventListener("click", clicked);
  };
  model.on("change:over", gone);
  return gone;
}
export default { initialize };
