// For how long something has gone on, by this page's own clock: it goes on while Python is busy.

const TOGETHER_S = 2; // two clocks that lie no further apart are the same one: messages take a while, too
const JITTER_S = 0.5;

export class Clock {
  constructor(now = () => Date.now() / 1000) {
    this.now = now;
    this.apart = Infinity; // of this clock from Python's, as the fastest message says
    this.began = null;
  }

  /** It began at `since_s` and is told so at `sent_s`, by Python's clock. `fresh`: that came just now; what a page that
   * was opened again begins with may be old, and says nothing about the clocks. */
  hear({ since_s, sent_s }, fresh = true) {
    if (since_s === null || since_s === undefined) return (this.began = null);
    if (fresh) this.apart = Math.min(this.apart, this.now() - sent_s);
    const began = since_s + (Number.isFinite(this.apart) && Math.abs(this.apart) > TOGETHER_S ? this.apart : 0);
    if (this.began === null || Math.abs(began - this.began) > JITTER_S) this.began = began;
  }

  /** Seconds; null where nothing goes on. */
  get elapsed() {
    return this.began === null ? null : Math.max(0, this.now() - this.began);
  }
}
