"use strict";
// The timeline of the HTML report: every span of a trace on one canvas, as far in or out as the reader likes.
// The data stand in the page itself, written by timeline_page.py; nothing is asked of a server. A name from a trace
// reaches the page as canvas text or textContent only.
(() => {
  const ROW = 17, ROW_GAP = 1, LANE_GAP = 8; // CSS pixels, as all lengths here
  const OVERVIEW = 38, AXIS = 21, BAND = 18, STRIP = 14;
  const STRIP_TOP = OVERVIEW + AXIS + BAND;
  const NARROWEST_NS = 50;
  const BROAD = 1.5; // narrower spans are drawn together, as high as the share of the pixel they cover
  const SAMPLES = 32; // of the spans under one pixel, asked for the colour that covers most of it
  const WORTH_CUTTING = 6; // characters: a name cut shorter than this says nothing
  const FONT = "11px system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

  // The data

  /** A column's values from its byte planes, lowest byte first. */
  function numbers(bytes, planes, count) {
    const Kind = planes > 4 ? Float64Array : planes > 2 ? Uint32Array : planes > 1 ? Uint16Array : Uint8Array;
    const values = new Kind(count);
    for (let plane = 0, at = 0; plane < planes; plane++) {
      const scale = 256 ** plane;
      for (let i = 0; i < count; i++) values[i] += bytes[at++] * scale;
    }
    return values;
  }

  /** The page's data block: the length of a JSON head, the head, then the columns it names. */
  async function unpacked(base64) {
    const text = atob(base64.trim());
    const packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    let at = 4 + new DataView(bytes.buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, at)));
    const columns = {};
    for (const [name, planes] of head.columns) {
      columns[name] = numbers(bytes.subarray(at, at + planes * head.count), planes, head.count);
      at += planes * head.count;
    }
    return { head, columns };
  }

  /** The spans, row by row and in each row by time. Times are nanoseconds since the first thing drawn. */
  class Spans {
    constructor(head, columns) {
      const n = head.count;
      this.count = head.spans; // behind them stand the pieces of the strip
      this.name = columns.name;
      this.kind = columns.kind;
      this.start = new Float64Array(n);
      this.end = new Float64Array(n);
      this.reach = new Float64Array(n); // the latest end so far in the row: what a binary search needs
      this.busy = new Float64Array(n + 1); // durations summed up
      this.launch = new Int32Array(n);
      for (const lane of head.lanes) for (const [first, count] of lane.rows) this.#readRow(columns, first, first + count);
      this.#readRow(columns, head.spans, head.count);
    }

    #readRow(columns, first, last) {
      let start = 0, reach = -1;
      for (let i = first; i < last; i++) {
        start += columns.gap[i];
        this.start[i] = start;
        this.end[i] = start + columns.duration[i];
        this.reach[i] = reach = Math.max(reach, this.end[i]);
        this.busy[i + 1] = this.busy[i] + columns.duration[i];
        this.launch[i] = columns.launch[i] - 1; // -1: none
      }
    }
  }

  /** The first index in [low, high) whose value is at least `wanted` (or above it); high where there is none. */
  function lowerBound(values, wanted, low, high, above = false) {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (values[middle] < wanted || (above && values[middle] === wanted)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Figures and colours

  const formats = [0, 1, 2, 3, 4, 5, 6].map(
    (digits) => new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
  );
  const grouped = (value, digits = 0) => formats[digits].format(value);

  function length(ns) {
    const [scale, unit] = Math.abs(ns) >= 1e9 ? [1e9, "s"] : Math.abs(ns) >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
    return `${grouped(ns / scale, 3)} ${unit}`;
  }

  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const mixed = (a, b, share) => a.map((value, i) => value + (b[i] - value) * share);
  const css = (rgb) => `rgb(${rgb.map(Math.round).join(",")})`;
  const luminance = ([r, g, b]) => 0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2;
  const contrast = (a, b) =>
    (Math.max(luminance(a), luminance(b)) + 0.05) / (Math.min(luminance(a), luminance(b)) + 0.05);

  /** A colour made for white paper, lightened until it stands out from a dark ground. */
  function readable(colour, ground) {
    const white = [255, 255, 255];
    let share = 0;
    if (luminance(ground) < 0.2) while (share < 0.9 && contrast(mixed(colour, white, share), ground) < 3) share += 0.05;
    return mixed(colour, white, share);
  }

  function tint(hex, ground) {
    const fill = readable(channels(hex), ground);
    return { fill: css(fill), dim: css(mixed(fill, ground, 0.8)), ink: luminance(fill) < 0.26 ? "#ffffff" : "#0d1117" };
  }

  // The view

  class Timeline {
    constructor(host, head, columns) {
      this.host = host;
      this.head = head;
      this.spans = new Spans(head, columns);
      for (const part of ["scroll", "sheet", "canvas", "tip", "detail", "search", "found", "levels", "legend"])
        this[part] = host.querySelector(`.tl-${part}`);
      this.ctx = this.canvas.getContext("2d", { alpha: false });
      this.home = head.window;
      [this.from, this.to] = this.home;
      this.selected = this.hovered = -1;
      this.started = []; // by the selected launch
      this.matched = null; // of each name, whether it is searched for
      this.strip = { first: head.spans, last: head.count };
      this.widths = new Map();
      this.tones = [...head.kinds, ...head.parts]; // what a span's kind refers to: [label, category or meaning, colour]
      this.weights = new Float64Array(this.tones.length);
      this.pointers = new Map();
      this.#arrange();
      this.#listen();
      this.#paintTheme();
      this.#resize();
    }

    // Layout

    #arrange() {
      const all = this.levels.checked;
      let y = STRIP_TOP + (this.strip.last > this.strip.first ? STRIP : 0) + LANE_GAP;
      this.top = y - LANE_GAP / 2;
      this.rows = [];
      for (const lane of this.head.lanes) {
        lane.top = y;
        lane.shown = all ? lane.rows.length : Math.min(lane.rows.length, lane.most);
        for (const [level, [first, count]] of lane.rows.entries()) {
          const visible = level < lane.shown;
          this.rows.push({ lane, first, last: first + count, y: y + (visible ? level : lane.shown - 1) * ROW, visible });
        }
        y += lane.shown * ROW + LANE_GAP;
      }
      this.lasts = this.rows.map((row) => row.last);
      this.height = y;
      this.sheet.style.height = `${y}px`;
      this.levels.parentElement.hidden = this.head.lanes.every((lane) => lane.rows.length <= lane.most);
    }

    #resize() {
      const most = Math.max(300, Math.round(0.8 * innerHeight));
      this.scroll.style.height = `${Math.min(this.height, most)}px`;
      this.wide = Math.max(120, this.scroll.clientWidth);
      this.high = Math.max(60, this.scroll.clientHeight);
      this.gutter = this.wide < 600 ? 84 : 150;
      this.plot = this.wide - this.gutter;
      this.ratio = devicePixelRatio || 1;
      this.canvas.width = Math.round(this.wide * this.ratio);
      this.canvas.height = Math.round(this.high * this.ratio);
      Object.assign(this.canvas.style, { width: `${this.wide}px`, height: `${this.high}px` });
      this.overview = null;
      this.redraw();
    }

    #paintTheme() {
      const style = getComputedStyle(this.host);
      const of = (name) => style.getPropertyValue(`--tl-${name}`).trim();
      this.colours = { ink: of("ink"), quiet: of("quiet"), ground: of("ground"), lane: of("lane"), line: of("line") };
      this.colours.accent = of("accent");
      const lane = channels(this.colours.lane);
      this.tints = this.tones.map(([, , hex]) => tint(hex, lane));
      this.overview = null;
      this.#writeLegend();
      this.redraw();
    }

    #writeLegend() {
      const spans = this.head.kinds.length, drawn = this.spans.kind.subarray(this.strip.first);
      const used = new Set(drawn), entries = this.tones.map(([label], tone) => [label, this.tints[tone].fill]);
      const line = (title, entries) => {
        const paragraph = document.createElement("p");
        paragraph.append(title);
        for (const [label, fill] of entries) {
          const swatch = document.createElement("i");
          swatch.style.background = fill;
          const entry = document.createElement("span");
          entry.append(swatch, label);
          paragraph.append(entry);
        }
        return paragraph;
      };
      const parts = entries.filter((_, tone) => used.has(tone));
      const lines = [line("Spans", new Map(entries.slice(0, spans))), ...(parts.length ? [line("Parts of a step", parts)] : [])];
      this.legend.replaceChildren(...lines);
    }

    // Time and place

    get scale() {
      return (this.to - this.from) / this.plot; // nanoseconds a pixel
    }

    x(t) {
      return this.gutter + (t - this.from) / this.scale;
    }

    show(from, to) {
      const span = Math.min(Math.max(to - from, NARROWEST_NS), this.head.extent);
      const middle = (from + to) / 2;
      this.from = Math.min(Math.max(middle - span / 2, 0), this.head.extent - span);
      this.to = this.from + span;
      this.redraw();
    }

    zoom(factor, x = this.gutter + this.plot / 2) {
      const share = Math.min(Math.max((x - this.gutter) / this.plot, 0), 1);
      const fixed = this.from + share * (this.to - this.from);
      const span = Math.min(Math.max((this.to - this.from) * factor, NARROWEST_NS), this.head.extent);
      this.show(fixed - share * span, fixed + (1 - share) * span);
    }

    pan(pixels) {
      const by = pixels * this.scale;
      this.show(this.from + by, this.to + by);
    }

    rowOf(span) {
      return this.rows[lowerBound(this.lasts, span, 0, this.rows.length, true)];
    }

    /** What is at a point: a span or a piece of the strip (-1: none), how many more under the same pixel, a step, a lane. */
    at(x, y) {
      const found = { span: -1, piece: -1, more: 0, step: null, lane: null };
      const t = this.from + (x - this.gutter) * this.scale;
      if (y < this.top) return x < this.gutter || y < OVERVIEW + AXIS ? found : this.#stepAt(found, t, y);
      const below = y + this.scroll.scrollTop;
      found.lane = this.head.lanes.find((lane) => below >= lane.top && below < lane.top + lane.shown * ROW);
      const row = this.rows.find((row) => row.visible && below >= row.y && below < row.y + ROW);
      if (!row || x < this.gutter) return found;
      [found.span, found.more] = this.#spanAt(row, t);
      return found;
    }

    /** The span of a row nearest to a time, at most two pixels away, and how many others lie there. */
    #spanAt(row, t) {
      const { start, end, reach } = this.spans, near = 2 * this.scale;
      const first = lowerBound(reach, t - near, row.first, row.last, true);
      const after = lowerBound(start, t + near, first, row.last);
      let nearest = -1, best = Infinity;
      for (let i = Math.max(first, after - 200); i < after; i++) {
        const away = Math.max(start[i] - t, t - end[i], 0);
        if (away <= best) [best, nearest] = [away, i];
      }
      const narrow = nearest >= 0 && end[nearest] - start[nearest] < this.scale;
      return [nearest, narrow ? after - first - 1 : 0];
    }

    #stepAt(found, t, y) {
      found.step = this.head.steps.find((step) => t >= step.start && t < step.end) ?? null;
      if (y >= STRIP_TOP) [found.piece] = this.#spanAt(this.strip, t);
      return found;
    }

    // Drawing

    redraw() {
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.draw();
      });
    }

    draw() {
      const began = performance.now();
      if (this.ratio !== (devicePixelRatio || 1)) this.#resize();
      const { ctx, colours } = this;
      ctx.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      ctx.fillStyle = colours.ground;
      ctx.fillRect(0, 0, this.wide, this.high);
      ctx.font = FONT;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      this.#clipped(0, this.top, this.wide, this.high - this.top, () => this.#drawLanes());
      this.#clipped(this.gutter, 0, this.plot, this.top, () => this.#drawHeader());
      this.#drawHeaderLabels();
      const { dataset } = this.canvas; // what is shown, for tests and for who inspects the page
      Object.assign(dataset, { from: this.from, to: this.to, selected: this.selected });
      dataset.frames = 1 + Number(dataset.frames ?? 0);
      dataset.frameMs = (performance.now() - began).toFixed(2);
    }

    #clipped(x, y, width, height, paint) {
      this.ctx.save();
      this.ctx.beginPath();
      this.ctx.rect(x, y, width, height);
      this.ctx.clip();
      paint();
      this.ctx.restore();
    }

    #drawLanes() {
      const { ctx, colours, gutter } = this, up = -this.scroll.scrollTop;
      for (const lane of this.head.lanes) {
        const y = lane.top + up, height = lane.shown * ROW;
        if (y > this.high || y + height < this.top) continue;
        ctx.fillStyle = colours.lane;
        ctx.fillRect(gutter, y - 1, this.plot, height + 1);
        this.#drawLaneLabel(lane, y);
      }
      this.#clipped(gutter, 0, this.plot, this.high, () => {
        for (const row of this.rows)
          if (row.visible && row.y + up < this.high && row.y + up + ROW > this.top) this.#drawRow(row, row.y + up);
        this.#drawStepLines();
        this.#drawLaunches(up);
        this.#outline(this.hovered, up, 1);
        this.#outline(this.selected, up, 2);
      });
    }

    #drawLaneLabel(lane, y) {
      const hidden = lane.rows.length - lane.shown;
      this.#write(lane.label, 6, y + ROW / 2 - 0.5, this.gutter - 16, this.colours.ink);
      const more = `+ ${hidden} level${hidden > 1 ? "s" : ""}`;
      if (hidden) this.#write(more, 6, y + ROW * 1.5 - 0.5, this.gutter - 12, this.colours.quiet);
    }

    /** One row of spans. Those too narrow to tell apart become columns, so that the cost follows the pixels. */
    #drawRow(row, y, full = ROW - ROW_GAP) {
      const { start, end, reach, busy, kind, name } = this.spans, { from, scale } = this;
      const broad = BROAD * scale, { matched } = this;
      const after = lowerBound(start, this.to, row.first, row.last);
      let run = null, over = 0; // columns alike; what the last one's spans cover of the next
      const add = (column, covered, tone, dim) => {
        const high = Math.max(2, Math.round(Math.min(1, covered / scale) * full));
        if (run && run.right === column && run.tone === tone && run.high === high && run.dim === dim) return run.right++;
        this.#drawColumns(run, y + full);
        run = { left: column, right: column + 1, tone, high, dim };
      };
      for (let i = lowerBound(reach, from, row.first, after); i < after; ) {
        if (end[i] - start[i] >= broad) {
          this.#drawSpan(i, y, full, matched && !matched[name[i]]);
          i++;
          continue;
        }
        const column = Math.max(0, Math.floor((start[i] - from) / scale)), edge = from + (column + 1) * scale;
        let j = Math.max(i + 1, lowerBound(start, edge, i, after));
        if (j - i > 1 && end[j - 1] - start[j - 1] >= broad) j--;
        const before = run?.right === column ? over : 0;
        over = Math.max(0, end[j - 1] - edge);
        const tone = this.#commonest(kind, i, j), dim = matched && this.matches[j] === this.matches[i];
        add(column, busy[j] - busy[i] - over + before, tone, dim);
        const goesOn = j < after && start[j] < edge + scale && end[j] - start[j] < broad;
        if (!goesOn && over > 0.2 * scale) add(column + 1, over, kind[j - 1], dim);
        i = j;
      }
      this.#drawColumns(run, y + full);
    }

    #drawColumns(run, bottom) {
      if (!run) return;
      this.ctx.fillStyle = this.tints[run.tone][run.dim ? "dim" : "fill"];
      this.ctx.fillRect(this.gutter + run.left, bottom - run.high, run.right - run.left, run.high);
    }

    #commonest(kind, i, j) {
      if (j - i === 1) return kind[i];
      const { start, end } = this.spans, { weights } = this;
      const stride = Math.ceil((j - i) / SAMPLES);
      weights.fill(0);
      let best = kind[i];
      for (let k = i; k < j; k += stride) {
        const tone = kind[k];
        weights[tone] += end[k] - start[k] + 1;
        if (weights[tone] > weights[best]) best = tone;
      }
      return best;
    }

    #drawSpan(i, y, high, dim) {
      const { ctx } = this, tone = this.tints[this.spans.kind[i]];
      const left = Math.max(this.x(this.spans.start[i]), this.gutter - 2);
      const right = Math.min(this.x(this.spans.end[i]), this.wide + 2);
      const gap = right - left > 4 ? 0.75 : 0; // keeps neighbours apart
      ctx.fillStyle = dim ? tone.dim : tone.fill;
      ctx.fillRect(left, y, right - left - gap, high);
      const inside = Math.max(left, this.gutter) + 4, room = Math.min(right, this.wide) - inside - 3;
      if (room > 12) this.#write(this.#short(i), inside, y + high / 2 + 0.5, room, dim ? this.colours.quiet : tone.ink);
    }

    #short(i) {
      if (i >= this.strip.first) return this.tones[this.spans.kind[i]][0];
      const id = this.spans.name[i];
      return this.head.short[id] ?? this.head.names[id];
    }

    /** Text as far as it fits; what is cut off is shown by an ellipsis. */
    #write(text, x, y, room, colour) {
      let width = this.widths.get(text);
      if (width === undefined) this.widths.set(text, (width = this.ctx.measureText(text).width));
      if (width > room) {
        const most = Math.floor((room / width) * text.length) - 1;
        if (most < WORTH_CUTTING) return;
        text = `${text.slice(0, most)}…`;
      }
      this.ctx.fillStyle = colour;
      this.ctx.fillText(text, x, y);
    }

    #drawStepLines() {
      this.ctx.fillStyle = this.colours.line;
      let before = -Infinity;
      for (const step of this.head.steps)
        for (const t of [step.start, step.end]) {
          const x = Math.round(this.x(t));
          if (x - before < 3 || x > this.wide) continue;
          this.ctx.fillRect(x, this.top, 1, this.high);
          before = x;
        }
    }

    #outline(i, up, thick) {
      if (i < 0) return;
      const { ctx } = this, row = this.rowOf(i);
      if (!row.visible) return;
      const left = Math.max(this.x(this.spans.start[i]), this.gutter - 4);
      const right = Math.max(Math.min(this.x(this.spans.end[i]), this.wide + 4), left + 2);
      ctx.strokeStyle = this.colours.ink;
      ctx.lineWidth = thick;
      ctx.strokeRect(left, row.y + up, right - left, ROW - ROW_GAP);
    }

    /** Lines from the selected kernel to its launch, or from the selected launch to all it started. */
    #drawLaunches(up) {
      if (this.selected < 0) return;
      const launch = this.spans.launch[this.selected];
      const pairs = launch >= 0 ? [[launch, this.selected]] : this.started.map((i) => [this.selected, i]);
      const { ctx } = this;
      ctx.strokeStyle = this.colours.accent;
      ctx.lineWidth = 1.75;
      for (const [above, below] of pairs.slice(0, 500)) {
        const x0 = this.x(this.spans.start[above]), y0 = this.rowOf(above).y + up + ROW - ROW_GAP;
        const x1 = this.x(this.spans.start[below]), y1 = this.rowOf(below).y + up;
        ctx.beginPath();
        ctx.moveTo(x0, y0);
        ctx.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
        ctx.stroke();
        ctx.fillStyle = this.colours.accent;
        for (const [x, y] of [[x0, y0], [x1, y1]]) ctx.fillRect(x - 2.5, y - 2.5, 5, 5);
      }
    }

    #drawHeader() {
      this.#drawOverview();
      this.#drawAxis();
      const { ctx, colours } = this, y = OVERVIEW + AXIS;
      for (const [k, step] of this.head.steps.entries()) {
        const left = this.x(step.start), right = this.x(step.end);
        if (right < this.gutter || left > this.wide || right - left < 1) continue;
        ctx.fillStyle = k % 2 ? colours.lane : colours.line;
        ctx.fillRect(left, y, right - left, BAND - 2);
        const inside = Math.max(left, this.gutter), room = Math.min(right, this.wide) - inside - 8;
        const label = room > 130 ? `${step.label} · ${length(step.end - step.start)}` : room > 50 ? step.label : step.number;
        if (room > 7 * label.length - 4) this.#write(label, inside + 4, y + BAND / 2 - 1, room + 4, colours.ink);
      }
      this.#drawStrip(STRIP_TOP, STRIP - 1);
    }

    /** The whole pixels of one piece, with its name where there is room. */
    #drawPiece(i, left, right, y, full) {
      const tone = this.tints[this.spans.kind[i]], room = right - left - 7;
      this.ctx.fillStyle = tone.fill;
      this.ctx.fillRect(this.gutter + left, y, right - left, full);
      if (room > 12) this.#write(this.#short(i), this.gutter + left + 4, y + full / 2 + 0.5, room, tone.ink);
    }

    /** Pieces under a pixel are stacked in it, each as high as its share of that time. */
    #drawStrip(y, full) {
      const { start, end, reach, kind } = this.spans, { from, scale, strip } = this;
      const after = lowerBound(start, this.to, strip.first, strip.last), shares = new Float64Array(this.tones.length);
      let column = -1;
      const stack = () => {
        let bottom = y + full;
        for (const [tone, share] of shares.entries()) {
          if (!share) continue;
          this.ctx.fillStyle = this.tints[tone].fill;
          this.ctx.fillRect(this.gutter + column, bottom - share * full, 1, share * full);
          bottom -= share * full;
        }
        shares.fill(0);
      };
      const add = (at, share, tone) => {
        if (at !== column) stack();
        column = at;
        shares[tone] += share;
      };
      for (let i = lowerBound(reach, from, strip.first, after); i < after; i++) {
        const left = Math.max(0, (start[i] - from) / scale), right = Math.min(this.plot, (end[i] - from) / scale);
        const inner = Math.ceil(left), outer = Math.floor(right), tone = kind[i];
        if (outer < inner) add(outer, right - left, tone);
        else {
          if (inner > left) add(inner - 1, inner - left, tone);
          if (outer > inner) this.#drawPiece(i, inner, outer, y, full);
          if (right > outer) add(outer, right - outer, tone);
        }
      }
      stack();
    }

    #drawAxis() {
      const { ctx, colours } = this;
      const least = 96 * this.scale, power = 10 ** Math.floor(Math.log10(least));
      const pitch = [1, 2, 5, 10].map((m) => m * power).find((p) => p >= least);
      const [unit, word] = pitch >= 1e9 ? [1e9, "s"] : pitch >= 1e6 ? [1e6, "ms"] : pitch >= 1e3 ? [1e3, "µs"] : [1, "ns"];
      const zero = this.head.window[0];
      for (let k = Math.ceil((this.from - zero) / pitch); zero + k * pitch <= this.to; k++) {
        const x = this.x(zero + k * pitch);
        ctx.fillStyle = colours.line;
        ctx.fillRect(Math.round(x), OVERVIEW + 3, 1, AXIS - 3);
        const label = `${grouped((k * pitch) / unit)} ${word}`;
        if (x + 7 * label.length < this.wide) this.#write(label, x + 4, OVERVIEW + AXIS / 2 + 1, 92, colours.quiet);
      }
    }

    #drawHeaderLabels() {
      const { gutter, colours } = this, room = gutter - 12;
      const whole = gutter > 100;
      this.#write("overview", 6, OVERVIEW / 2, room, colours.quiet);
      this.#write(whole ? `showing ${length(this.to - this.from)}` : length(this.to - this.from), 6, OVERVIEW + AXIS / 2 + 1, room, colours.quiet);
      if (this.head.steps.length) this.#write("steps", 6, OVERVIEW + AXIS + BAND / 2 - 1, room, colours.quiet);
      if (this.strip.last > this.strip.first) this.#write(this.head.strip.title, 6, STRIP_TOP + STRIP / 2, room, colours.quiet);
    }

    #drawOverview() {
      const { ctx, colours, gutter, plot } = this, across = plot / this.head.extent;
      this.overview ??= this.#surveyed();
      ctx.fillStyle = colours.lane;
      ctx.fillRect(gutter, 0, plot, OVERVIEW);
      for (const { x, high, tone } of this.overview) {
        ctx.fillStyle = this.tints[tone].fill;
        ctx.fillRect(gutter + x, OVERVIEW - 4 - high, 1, high);
      }
      const left = gutter + this.from * across, wide = Math.max((this.to - this.from) * across, 2);
      ctx.globalAlpha = 0.72;
      ctx.fillStyle = colours.ground;
      ctx.fillRect(gutter, 0, left - gutter, OVERVIEW);
      ctx.fillRect(left + wide, 0, plot, OVERVIEW);
      ctx.globalAlpha = 1;
      ctx.strokeStyle = colours.accent;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(left + 0.75, 1, wide - 1.5, OVERVIEW - 3);
    }

    /** For each pixel of the whole extent the row that covers most of it: GPU streams, or host threads without any. */
    #surveyed() {
      const { start, busy, reach, end, kind } = this.spans, pixel = this.head.extent / this.plot;
      const columns = [];
      for (let x = 0; x < this.plot; x++) {
        let best = { share: 0 };
        for (const [first, count] of this.head.overview) {
          const left = x * pixel, right = left + pixel;
          const i = lowerBound(reach, left, first, first + count, true), j = lowerBound(start, right, i, first + count);
          if (j <= i) continue;
          const outside = Math.max(0, left - start[i]) + Math.max(0, end[j - 1] - right);
          const share = Math.min(1, (busy[j] - busy[i] - outside) / pixel);
          if (share > best.share) best = { share, tone: this.#commonest(kind, i, j) };
        }
        if (best.share > 0) columns.push({ x, tone: best.tone, high: Math.max(1, best.share * (OVERVIEW - 8)) });
      }
      return columns;
    }

    // Reading

    /** What is known about a span: lines of text. */
    told(i) {
      const { spans, head } = this, [, category] = this.tones[spans.kind[i]];
      const start = spans.start[i], step = head.steps.find((s) => start >= s.start && start < s.end);
      const inStep = step ? `, ${length(start - step.start)} into ${step.label}` : "";
      const lines = [
        head.names[spans.name[i]],
        `${category}, ${length(spans.end[i] - start)}`,
        `starts at ${grouped((start - head.window[0]) / 1e6, 6)} ms${inStep}`,
        this.rowOf(i).lane.label,
      ];
      if (head.launched.includes(category)) lines.push(this.#toldLaunch(i));
      return lines;
    }

    #toldLaunch(i) {
      const { spans, head } = this, launch = spans.launch[i];
      if (launch < 0) return head.noLaunch;
      const wait = spans.start[i] - spans.start[launch];
      const when = wait < 0 ? `${length(-wait)} after it started: the clocks disagree` : `${length(wait)} before`;
      return `launched by ${head.names[spans.name[launch]]} on ${this.rowOf(launch).lane.label}, ${when}`;
    }

    #toldStep({ step, piece }) {
      const wall = step.end - step.start;
      if (piece < 0 || !step.parts) return [step.label, length(wall), ...(step.flags.length ? [step.flags.join(", ")] : [])];
      const tone = this.spans.kind[piece], [label, meaning] = this.tones[tone];
      const all = step.parts[tone - this.head.kinds.length];
      const sum = `${length(all)}, ${grouped((100 * all) / wall, 1)} % of ${step.label}`;
      const here = length(this.spans.end[piece] - this.spans.start[piece]);
      return this.head.strip.inPlace ? [label, `${here} here`, `in all ${sum}`, meaning] : [label, sum, meaning];
    }

    #hover(x, y) {
      const found = this.at(x, y);
      const lines = found.span >= 0 ? this.told(found.span) : found.step ? this.#toldStep(found) : null;
      if (found.more > 0) lines.push(`and ${grouped(found.more)} more under these pixels: zoom in`);
      if (!lines && found.lane && x < this.gutter) this.#tip([found.lane.label], x, y);
      else this.#tip(lines, x, y);
      if (found.span !== this.hovered) {
        this.hovered = found.span;
        this.redraw();
      }
    }

    #tip(lines, x, y) {
      const { tip } = this;
      tip.hidden = !lines;
      if (!lines) return;
      tip.replaceChildren(
        ...lines.map((text, i) => {
          const line = document.createElement(i ? "div" : "b");
          line.textContent = text;
          return line;
        }),
      );
      const wide = tip.offsetWidth, high = tip.offsetHeight;
      const left = x + 14 + wide > this.wide ? Math.max(0, x - 14 - wide) : x + 14;
      const top = y + 16 + high > this.high ? Math.max(-high, y - high - 10) : y + 16;
      Object.assign(tip.style, { left: `${left + this.scroll.offsetLeft}px`, top: `${top + this.scroll.offsetTop}px` });
    }

    select(i, reveal = false) {
      this.selected = i;
      this.started = [];
      if (i >= 0) for (let k = 0; k < this.spans.count; k++) if (this.spans.launch[k] === i) this.started.push(k);
      this.detail.textContent = i < 0 ? "" : this.#told(i);
      if (i >= 0 && reveal) this.#reveal(i);
      this.redraw();
    }

    #told(i) {
      const started = this.started.length ? [`started ${grouped(this.started.length)} on the GPU`] : [];
      return [...this.told(i), ...started].join(" · ");
    }

    #reveal(i) {
      const start = this.spans.start[i], end = this.spans.end[i], span = this.to - this.from;
      if (end - start > span || end - start < this.scale) this.show(start - 4 * (end - start), end + 4 * (end - start));
      else if (start < this.from || end > this.to) this.show((start + end - span) / 2, (start + end + span) / 2);
      if (!this.rowOf(i).visible) {
        this.levels.checked = true;
        this.#rearrange();
      }
      const y = this.rowOf(i).y, { scroll } = this;
      if (y < scroll.scrollTop + this.top || y + ROW > scroll.scrollTop + this.high) scroll.scrollTop = y - this.high / 2;
    }

    /** The span beside the selected one in its row, or nearest in time in the row above or below. */
    #neighbour(dx, dy) {
      if (this.selected < 0) return this.#middle();
      const row = this.rowOf(this.selected);
      if (dx) return Math.min(Math.max(this.selected + dx, row.first), row.last - 1);
      const shown = this.rows.filter((other) => other.visible || other === row);
      const next = shown[shown.indexOf(row) + dy];
      return next ? this.#nearest(next, (this.spans.start[this.selected] + this.spans.end[this.selected]) / 2) : this.selected;
    }

    #nearest(row, t) {
      const after = lowerBound(this.spans.start, t, row.first, row.last, true);
      return Math.max(row.first, after - 1);
    }

    #middle() {
      const row = this.rows.find((row) => row.visible && row.y - this.scroll.scrollTop >= this.top);
      return row ? this.#nearest(row, (this.from + this.to) / 2) : -1;
    }

    // Searching

    find(text) {
      const wanted = text.trim().toLowerCase(), { spans, head } = this;
      this.matched = null;
      this.found.textContent = "";
      if (wanted) {
        this.matched = Uint8Array.from(head.names, (name) => name.toLowerCase().includes(wanted));
        this.matches = new Uint32Array(spans.count + 1);
        for (let i = 0; i < spans.count; i++) {
          const hit = this.matched[spans.name[i]];
          this.matches[i + 1] = this.matches[i] + hit;
        }
        this.hits = this.#ranked();
      }
      this.redraw();
      this.#toldHits();
    }

    /** The matches in the order of a search: kernels first, what Python called last; each by time. */
    #ranked() {
      const { kind, name, start, count } = this.spans;
      const ranks = this.head.kinds.map(([, category]) => (category === "kernel" ? 0 : category === "python_function" ? 2 : 1));
      const hits = [];
      for (let i = 0; i < count; i++) if (this.matched[name[i]]) hits.push(i);
      return hits.sort((a, b) => ranks[kind[a]] - ranks[kind[b]] || start[a] - start[b] || a - b);
    }

    /** How many match, and which of them is selected. */
    #toldHits() {
      if (!this.matched) return;
      const names = this.matched.reduce((sum, hit) => sum + hit, 0), at = this.hits.indexOf(this.selected);
      const which = at < 0 ? "" : `${grouped(at + 1)} of `, count = this.hits.length;
      const many = `${which}${grouped(count)} span${count === 1 ? "" : "s"}, ${grouped(names)} name${names === 1 ? "" : "s"}`;
      this.found.textContent = count ? `${many}; Enter goes to the next` : "no span has this in its name";
    }

    /** The next match in that order after the selected span, or the one before it; from the end it goes on at the other. */
    #findNext(backwards) {
      const count = this.matched ? this.hits.length : 0;
      if (!count) return;
      const at = this.hits.indexOf(this.selected), first = backwards ? count - 1 : 0;
      this.select(this.hits[at < 0 ? first : (at + (backwards ? -1 : 1) + count) % count], true);
      this.#toldHits();
    }

    // Hands

    #listen() {
      const { canvas, host, scroll } = this;
      canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
      canvas.addEventListener("pointerdown", (event) => this.#press(event));
      canvas.addEventListener("pointermove", (event) => this.#move(event));
      for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => this.#release(event));
      canvas.addEventListener("pointerleave", () => this.#hover(-1, -1));
      canvas.addEventListener("dblclick", () => this.selected >= 0 && this.#zoomTo(this.selected));
      canvas.addEventListener("keydown", (event) => this.#key(event));
      scroll.addEventListener("scroll", () => this.redraw());
      this.search.addEventListener("input", () => this.find(this.search.value));
      this.search.addEventListener("keydown", (event) => {
        if (event.key === "Enter") this.#findNext(event.shiftKey);
        if (event.key === "Escape") this.find((this.search.value = ""));
      });
      this.levels.addEventListener("change", () => this.#rearrange());
      const buttons = { in: () => this.zoom(0.5), out: () => this.zoom(2), whole: () => this.show(...this.home) };
      for (const [name, act] of Object.entries(buttons)) host.querySelector(`.tl-${name}`).addEventListener("click", act);
      new ResizeObserver(() => scroll.clientWidth !== this.wide && this.#resize()).observe(scroll);
      addEventListener("resize", () => this.#resize());
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#paintTheme());
    }

    #rearrange() {
      this.#arrange();
      this.#resize();
    }

    #point(event) {
      const box = this.canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    }

    /** With Ctrl (as a pinch has it) zooms around the cursor; sideways or with Shift it pans. Else the page scrolls. */
    #wheel(event) {
      const { x } = this.#point(event), pixels = event.deltaMode ? 20 : 1;
      const whole = this.to - this.from >= this.head.extent;
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const zooms = event.ctrlKey || event.metaKey;
      if (x < this.gutter || (!zooms && (!sideways || whole))) return;
      event.preventDefault();
      if (zooms) this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY * pixels)) * 0.01), x);
      else this.pan((event.deltaX || event.deltaY) * pixels);
    }

    #press(event) {
      const at = this.#point(event);
      this.canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, at);
      this.moved = this.pointers.size > 1;
      this.onOverview = at.y < OVERVIEW && at.x >= this.gutter;
      this.pressed = at;
      if (this.onOverview) this.#centre(at.x);
      this.#tip(null);
    }

    #move(event) {
      const at = this.#point(event), before = this.pointers.get(event.pointerId);
      if (!before) return this.#hover(at.x, at.y);
      this.pointers.set(event.pointerId, at);
      this.moved ||= Math.hypot(at.x - this.pressed.x, at.y - this.pressed.y) > 3;
      if (this.pointers.size > 1) this.#pinch(event.pointerId, before, at);
      else if (this.onOverview) this.#centre(at.x);
      else if (this.moved) {
        this.canvas.style.cursor = "grabbing";
        this.pan(before.x - at.x);
        this.scroll.scrollTop += before.y - at.y;
      }
    }

    #release(event) {
      if (!this.pointers.delete(event.pointerId)) return;
      this.canvas.style.cursor = "";
      if (this.moved || this.onOverview || event.type === "pointercancel") return;
      this.select(this.at(this.pressed.x, this.pressed.y).span);
    }

    #pinch(id, before, at) {
      const [other] = [...this.pointers].filter(([key]) => key !== id).map(([, point]) => point);
      const apart = (point) => Math.max(20, Math.abs(point.x - other.x));
      this.zoom(apart(before) / apart(at), (at.x + other.x) / 2);
    }

    #centre(x) {
      const t = ((x - this.gutter) / this.plot) * this.head.extent, half = (this.to - this.from) / 2;
      this.show(t - half, t + half);
    }

    #zoomTo(i) {
      const start = this.spans.start[i], end = this.spans.end[i], margin = Math.max((end - start) / 4, 10);
      this.show(start - margin, end + margin);
    }

    #key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const step = 0.15 * this.plot, { launch } = this.spans, i = this.selected;
      const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const acts = {
        ArrowLeft: () => this.pan(-step),
        ArrowRight: () => this.pan(step),
        ArrowUp: () => (this.scroll.scrollTop -= 3 * ROW),
        ArrowDown: () => (this.scroll.scrollTop += 3 * ROW),
        "+": () => this.zoom(0.6),
        "=": () => this.zoom(0.6),
        "-": () => this.zoom(1 / 0.6),
        0: () => this.show(...this.home),
        Home: () => this.show(...this.home),
        Enter: () => (i < 0 ? this.select(this.#middle(), true) : this.#zoomTo(i)),
        Escape: () => this.select(-1),
        l: () => i >= 0 && (launch[i] >= 0 || this.started.length) && this.select(launch[i] >= 0 ? launch[i] : this.started[0], true),
        "/": () => this.search.focus(),
      };
      const act = event.shiftKey && arrows[event.key] ? () => this.select(this.#neighbour(...arrows[event.key]), true) : acts[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }
  }

  async function start(host) {
    const say = (text) => (host.querySelector(".tl-state").textContent = text);
    if (typeof DecompressionStream === "undefined")
      return say("This browser cannot unpack the timeline (it has no DecompressionStream): a browser of 2023 or later can.");
    try {
      const { head, columns } = await unpacked(host.querySelector(".tl-data").textContent);
      host.querySelector(".tl-ready").hidden = false;
      new Timeline(host, head, columns);
      host.dataset.state = "ready";
      say("");
    } catch (error) {
      say(`The timeline could not be drawn: ${error.message}. The figures on this page do not depend on it.`);
    }
  }

  for (const host of document.querySelectorAll(".gpulab-timeline")) start(host);
})();
