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

/** Lines that stand on each other as sums, the highest first: each is drawn over the one before. */
export function sums(lines) {
  const summed = [];
  for (const line of lines) {
    const below = summed[0]?.y;
    summed.unshift({ ...line, y: below ? line.y.map((v, i) => v + below[i]) : line.y });
  }
  return summed;
}

/** What a chart shows at `x`: of lines that stand on each other their sum and its largest parts. */
export function readout({ lines, unit, xUnit, stacked }, x, figure) {
  const named = lines.map(({ label, ...line }) => [label, valueAt(line, x)]).filter(([, y]) => y !== null);
  const words = ([label, y]) => `${label} ${figure(y)}${unit && ` ${unit}`}`;
  const at = `at ${figure(x)} ${xUnit}: `;
  if (!stacked) return named.length ? at + named.map(words).join(", ") : "";
  const whole = named.reduce((sum, [, y]) => sum + y, 0);
  if (!whole) return `${at}no step`;
  const parts = named.filter(([, y]) => y > 0.01 * whole).sort((a, b) => b[1] - a[1]);
  return `${at}step ${figure(whole)} ${unit} (${parts.slice(0, 3).map(words).join(", ")})`;
}

/** The last value at or before `x`; null where the line is broken or has ended. */
function valueAt({ x: places, y }, x) {
  if (x > places[places.length - 1]) return null;
  return y[places.findLastIndex((place) => place <= x)] ?? null;
}
