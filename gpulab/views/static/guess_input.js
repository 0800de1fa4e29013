// Makes the plain text of a guess alive: its field is hidden until a kernel stands behind it, and again when it closes
// it. No widget is displayed, so a saved notebook holds only the text.
function initialize({ model }) {
  const place = `.gpulab-guess-${model.get("key")}`;
  const style = document.createElement("style");
  style.textContent = `${place} input, ${place} input + span { display: inline-block !important; }`;
  document.head.append(style);
  const typed = (event) => {
    const field = event.target.closest?.(`${place} input`);
    if (!field) return;
    field.style.outline = field.value === "" ? "" : "2px solid #1E7B45";
    if (field.value === "") return;
    model.send({ kind: "guess", value: field.value });
    const unit = field.nextElementSibling;
    if (event.type === "change" && unit) unit.textContent = unit.textContent.replace(", then Enter,", ": noted ✓");
  };
  // a notebook takes letters for commands, before its outputs meet them: what is typed here stays here
  const kept = (event) => {
    if (event.target.closest?.(`${place} input`)) event.stopPropagation();
  };
  document.addEventListener("change", typed);
  document.addEventListener("input", typed);
  window.addEventListener("keydown", kept, true);
  const gone = () => {
    style.remove();
    document.removeEventListener("change", typed);
    document.removeEventListener("input", typed);
    window.removeEventListener("keydown", kept, true);
  };
  model.on("change:over", gone);
  return gone;
}
export default { initialize };
