// Changes the source of a cell of the notebook around us, where its front end lets a widget reach it: JupyterLab and
// Notebook 7, whose widget manager knows the document.

/** Puts `after` in the place of the first of `texts` that a cell holds, below its magics. What came of it:
 *  "applied", "changed": no cell holds one of them, "unreachable": a widget cannot reach the cells here. */
export function applyToCell(manager, texts, after) {
  const cells = manager?.context?.model?.cells;
  if (!cells) return "unreachable";
  for (const before of texts) {
    for (let i = 0; i < cells.length; i++) {
      const shared = cells.get(i).sharedModel;
      const changed = replaced(shared.getSource(), before, after);
      if (changed === null) continue;
      shared.setSource(changed);
      return "applied";
    }
  }
  return "changed";
}

export const APPLY_NOTES = {
  applied: "Applied.",
  changed: "Not applied: the cell was changed by hand, or is gone. Undo that change, or copy the edit.",
  unreachable: "This front end keeps cells from widgets. Run %gpulab apply: it adds the changed cell below. Or copy it.",
};

/** The cell's text with `after` in the place of `before`; null where it does not hold that, and nothing else but magics. */
export function replaced(source, before, after) {
  const place = source.indexOf(before.trim());
  if (place < 0 || !before.trim()) return null;
  const head = source.slice(0, place);
  const tail = source.slice(place + before.trim().length);
  if (tail.trim() || !head.split("\n").every((line) => !line.trim() || /^\s*(%|#)/.test(line))) return null;
  return head + after.trim() + tail;
}
