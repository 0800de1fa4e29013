// Changes the source of a cell of the notebook around us, where its front end lets a widget reach it: JupyterLab and
// Notebook 7, whose widget manager knows the document.

/** Whether the one code cell that holds `before` now holds `after`. A first line of `%%gpuprofile` stays as it is. */
export function applyToCell(manager, before, after) {
  const cells = manager?.context?.model?.cells;
  if (!cells) return false;
  for (let i = 0; i < cells.length; i++) {
    const shared = cells.get(i).sharedModel;
    const changed = replaced(shared.getSource(), before, after);
    if (changed === null) continue;
    shared.setSource(changed);
    return true;
  }
  return false;
}

/** The cell's text with `after` in the place of `before`; null where it does not hold that, and nothing else but magics. */
export function replaced(source, before, after) {
  const place = source.indexOf(before.trim());
  if (place < 0 || !before.trim()) return null;
  const head = source.slice(0, place);
  const tail = source.slice(place + before.trim().length);
  if (tail.trim() || !head.split("\n").every((line) => !line.trim() || /^\s*(%|#)/.test(line))) return null;
  return head + after.trim() + tail;
}
