// What the bench decides by itself, without a page.

/** The toggles that differ from the baseline, by name. */
export function settingsOf(toggles) {
  return Object.fromEntries(toggles.filter((t) => t.value !== null).map((t) => [t.name, t.value]));
}

/** Which rows are open after a click on `id`: one, then two as A and B, then one again; a click on an open one closes it. */
export function chosenRows(marks, id) {
  if (marks.includes(id)) return marks.filter((other) => other !== id);
  return marks.length === 1 ? [...marks, id] : [id];
}

/** The rows in the order of a column, numbers as numbers; equal ones stay as they came. */
export function order(rows, { by, descending }) {
  const key = (row) => row.getAttribute(`data-by-${by}`);
  const first = (row) => Number(row.getAttribute("data-by-number"));
  const compare = (a, b) => (by === "setting" ? key(a).localeCompare(key(b)) : Number(key(a)) - Number(key(b)));
  return [...rows].sort((a, b) => (descending ? -1 : 1) * compare(a, b) || first(a) - first(b));
}
