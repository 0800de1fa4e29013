// Figures as people read them.

export function elapsed(s) {
  const whole = Math.floor(s);
  const [h, m, sec] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(sec)}` : `${m}:${two(sec)}`;
}

/** For how long something has gone on, in words: "less than 1 s", "12 s", "2 min 5 s", as Python says it. */
export function lasting(s) {
  const whole = Math.floor(s);
  if (whole < 120) return whole || !s ? `${whole} s` : "less than 1 s";
  const minutes = Math.floor(whole / 60);
  return minutes < 120 ? `${minutes} min ${whole % 60} s` : `${grouped(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

export function grouped(n) {
  return String(n).replace(/\B(?=(\d{3})+$)/g, ","); // not the reader's locale: the report prints commas too
}

/** Three significant digits, whole numbers grouped: 0.123, 1.23, 12.3, 123, 1,234. */
export function figure(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 100) return grouped(Math.round(x));
  return x.toFixed(size >= 10 ? 1 : size >= 1 || size === 0 ? 2 : 3);
}

/** What the header says of progress, and the fraction of its bar (null: no bar). A loop may leave its epoch early. */
export function progress({ step, total, total_of }) {
  if (!step) return { text: "before the first step", fraction: null };
  if (!total) return { text: `step ${grouped(step)}`, fraction: null };
  if (step <= total) {
    const of = total_of === "epoch" ? `at most ${grouped(total)} (one epoch)` : grouped(total);
    return { text: `step ${grouped(step)} of ${of}`, fraction: step / total };
  }
  const within = ((step - 1) % total) + 1;
  const round = Math.floor((step - 1) / total) + 1;
  return {
    text: `step ${grouped(step)} · ${total_of} ${grouped(round)}, step ${grouped(within)} of ${grouped(total)}`,
    fraction: within / total,
  };
}

/** The end of the time axis: a little beyond now and round, so that it moves seldom. */
export function horizon(s) {
  for (let unit = 5; ; unit *= 10) {
    for (const k of [1, 2, 3, 4, 6, 8]) if (unit * k >= s) return unit * k;
  }
}
