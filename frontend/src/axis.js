// Where an axis of values ends.

const ABOVE_AXIS = 3; // an axis of times and rates ends at three times their 95th percentile; what is above is told

/** A round end of an axis at or above `max`. */
export function roundUp(max) {
  if (!(max > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(max));
  for (const k of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (unit * k >= max) return unit * k;
  return unit * 10;
}

/** An axis that one outlier (the first step, a compile) does not flatten: what lies above it is counted. */
export function cappedAxis(values) {
  const sorted = Float64Array.from(values).sort();
  const max = sorted[sorted.length - 1];
  const cap = sorted[Math.floor(0.95 * (sorted.length - 1))] * ABOVE_AXIS;
  if (sorted.length < 5 || max <= cap) return { top: roundUp(max * 1.08), above: 0, largest: max };
  const top = roundUp(cap);
  return { top, above: values.filter((v) => v > top).length, largest: max };
}
