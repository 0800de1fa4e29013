// What the charts draw, in bounded memory: where a curve outgrows its capacity, neighbours are merged in pairs.

const CAPACITY = 4096;
const RECENT_S = 3;
const RECENT_STEPS = 5;
const MOST_RECENT = 16_384; // rows: three seconds of as many as a message holds
const SILENCE_S = 2; // a meter silent for longer gets a gap in its curve, not a line across it

/**
 * Steps as columns: end (s), mean wall (ms), mean wait (ms), slowest wall (ms), how many steps a point stands for, and
 * how many samples they had together (NaN: unknown).
 */
export class StepHistory {
  constructor(capacity = CAPACITY) {
    this.capacity = capacity;
    this.group = 1; // steps per point, at most
    this.end = [];
    this.wall = [];
    this.wait = [];
    this.slowest = [];
    this.count = [];
    this.samples = [];
    this.samplesKnown = true;
    this.recent = []; // the last seconds, unmerged: [end_s, wall_ms, samples_per_s]
  }

  get length() {
    return this.end.length;
  }

  push(end, wall, wait, rate) {
    this.recent.push([end, wall, rate]);
    if (this.recent.length > MOST_RECENT) this.recent.splice(0, MOST_RECENT / 2); // a hidden page asks for no throughput
    const samples = (rate * wall) / 1000;
    if (!Number.isFinite(samples)) this.samplesKnown = false; // from then on steps are counted
    const last = this.length - 1;
    const row = [end, wall, wait, wall, 1, samples];
    if (last >= 0 && this.count[last] < this.group) this.#merge(last, row);
    else this.#columns().forEach((column, k) => column.push(row[k]));
    if (this.length >= this.capacity) this.#halve();
  }

  #columns() {
    return [this.end, this.wall, this.wait, this.slowest, this.count, this.samples];
  }

  #merge(i, [end, wall, wait, slowest, count, samples]) {
    const n = this.count[i] + count;
    this.wall[i] += ((wall - this.wall[i]) * count) / n;
    this.wait[i] += ((wait - this.wait[i]) * count) / n;
    this.slowest[i] = Math.max(this.slowest[i], slowest);
    this.end[i] = end;
    this.count[i] = n;
    this.samples[i] += samples;
  }

  #halve() {
    const old = this.#columns();
    const n = this.length;
    [this.end, this.wall, this.wait, this.slowest, this.count, this.samples] = old.map(() => []);
    this.group *= 2;
    for (let i = 0; i < n; i++) {
      const row = old.map((column) => column[i]);
      if (i > 0 && i % 2 === 0) this.#merge(this.length - 1, row); // the first stays as it is: there the run began
      else this.#columns().forEach((column, k) => column.push(row[k]));
    }
  }

  /** Per point: samples per second of step time, or steps per second where samples are unknown. */
  rates() {
    const amount = this.samplesKnown ? this.samples : this.count;
    return amount.map((n, i) => (this.wall[i] > 0 ? (1000 * n) / (this.wall[i] * this.count[i]) : null));
  }

  /** {value, unit} over the last seconds of steps; null before the first step. */
  throughput() {
    const last = this.recent.length - 1;
    if (last < 0) return null;
    const from = this.recent[last][0] - RECENT_S;
    let first = this.recent.findIndex((row) => row[0] >= from);
    first = Math.max(0, Math.min(first, last + 1 - RECENT_STEPS));
    if (first > 0) this.recent.splice(0, first);
    let wall = 0;
    let samples = 0;
    for (const [, ms, rate] of this.recent) {
      wall += ms;
      samples += rate * ms; // NaN once unknown: then steps are counted
    }
    if (!(wall > 0)) return null;
    return Number.isFinite(samples)
      ? { value: samples / wall, unit: "samples/s" }
      : { value: (1000 * this.recent.length) / wall, unit: "steps/s" };
  }
}

/** One meter's curve; a merged point is the mean of its readings. null marks a silence. */
export class Curve {
  constructor(capacity = CAPACITY) {
    this.capacity = capacity;
    this.group = 1;
    this.t = [];
    this.value = [];
    this.count = [];
  }

  get last() {
    return this.value.length ? this.value[this.value.length - 1] : null;
  }

  push(t, value) {
    if (!Number.isFinite(value)) return;
    const last = this.t.length - 1;
    if (last >= 0 && t <= this.t[last]) return;
    const silent = last >= 0 && t - this.t[last] > SILENCE_S;
    if (silent) this.#append(this.t[last] + SILENCE_S / 2, null, this.group);
    if (!silent && last >= 0 && this.value[last] !== null && this.count[last] < this.group) {
      const n = ++this.count[last];
      this.value[last] += (value - this.value[last]) / n;
      this.t[last] = t;
    } else this.#append(t, value, 1);
    if (this.t.length >= this.capacity) this.#halve();
  }

  #append(t, value, count) {
    this.t.push(t);
    this.value.push(value);
    this.count.push(count);
  }

  #halve() {
    const { t, value, count } = this;
    this.t = [];
    this.value = [];
    this.count = [];
    this.group *= 2;
    for (let i = 0; i < t.length; i++) {
      const pair = i > 0 && i + 1 < t.length && value[i] !== null && value[i + 1] !== null; // the first stays as it is
      if (!pair) {
        this.#append(t[i], value[i], count[i]);
        continue;
      }
      const n = count[i] + count[i + 1];
      this.#append(t[i + 1], (value[i] * count[i] + value[i + 1] * count[i + 1]) / n, n);
      i++;
    }
    if (this.t.length > 0.75 * this.capacity) this.#closeGaps();
  }

  /** A meter that is silent again and again has more gaps than a chart can show. */
  #closeGaps() {
    const heard = this.value.map((value, i) => [this.t[i], value, this.count[i]]).filter(([, value]) => value !== null);
    this.t = heard.map((row) => row[0]);
    this.value = heard.map((row) => row[1]);
    this.count = heard.map((row) => row[2]);
  }
}
