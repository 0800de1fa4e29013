// One plot: a thin coat over uPlot that knows our axes, our palette and nothing of runs.

import uPlot from "uplot";
import { elapsed, figure } from "./format.js";
import { palette } from "./theme.js";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
const Y_AXIS_PX = 46; // one width for all, so that plots above each other share their time axis

export const join = uPlot.join;
export const stepped = uPlot.paths.stepped({ align: 1 });

function timeLabels(chart, values) {
  const long = chart.scales.x.max >= 120;
  return values.map((v) => (long ? elapsed(v) : `${v} s`));
}

function lineOptions({ color, fill, width = 1.6, points = true, dash, paths }) {
  return {
    stroke: () => color(palette()),
    ...(fill && { fill: () => fill(palette()) }),
    width,
    dash,
    paths,
    spanGaps: false,
    points: points ? { size: 4, width: 1, fill: () => color(palette()) } : { show: false },
  };
}

export class Chart {
  /** `lines`: [{color(palette), fill, width}]; `syncKey` joins the cursors of one run's plots; `labels`: of the x-axis. */
  constructor(host, { lines, syncKey, onCursor, bands, labels = { incrs: TIME_STEPS, values: timeLabels } }) {
    this.host = host;
    this.labels = labels;
    this.range = { x: [0, 5], y: [0, 1] };
    this.onCursor = onCursor;
    this.bands = bands;
    this.plot = new uPlot(this.#options(lines, syncKey), [[], ...lines.map(() => [])], host);
  }

  #options(lines, syncKey) {
    const axis = (more) => ({
      font: FONT,
      stroke: () => palette().faint,
      grid: { stroke: () => palette().grid, width: 1 },
      ticks: { show: false },
      ...more,
    });
    return {
      ...this.#size(),
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: syncKey, setSeries: false }, points: { size: (_, i) => (lines[i - 1].paths ? 0 : 6) } },
      scales: {
        x: { time: false, range: () => this.range.x },
        y: { range: () => this.range.y },
      },
      axes: [
        axis({ size: 24, gap: 4, space: 64, ...this.labels }),
        axis({ size: Y_AXIS_PX, gap: 6, space: 30, values: (_, values) => values.map(tick) }),
      ],
      series: [{}, ...lines.map(lineOptions)],
      hooks: {
        drawClear: [(plot) => this.#drawBands(plot)],
        setCursor: [(plot) => this.onCursor?.(plot.cursor.idx ?? null)],
      },
    };
  }

  #size() {
    return { width: Math.max(40, this.host.clientWidth), height: Math.max(30, this.host.clientHeight) };
  }

  #drawBands({ ctx, bbox, scales }) {
    const ratio = devicePixelRatio || 1;
    const colors = palette();
    const at = (s) => bbox.left + (Math.min(s, scales.x.max) / scales.x.max) * bbox.width;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, -apple-system, 'Segoe UI', sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    const named = new Set();
    let free = bbox.left; // labels of narrow bands stand right of each other
    for (const { from, to, label } of this.bands?.() ?? []) {
      const [left, right] = [at(from), at(to)];
      ctx.fillStyle = colors.band;
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      if (!label) continue;
      const textLeft = Math.max(left + 4 * ratio, free);
      const textRight = textLeft + ctx.measureText(label).width;
      const end = named.has(label) ? right : bbox.left + bbox.width; // beyond its band only the first of a name
      if (textRight > end) continue;
      ctx.fillStyle = colors.faint;
      ctx.fillText(label, textLeft, bbox.top + 3 * ratio);
      named.add(label);
      free = textRight + 8 * ratio;
    }
    ctx.restore();
  }

  draw(data, xMax, yMax, yMin = 0) {
    this.range = { x: [0, xMax], y: [yMin, yMax] };
    this.plot.setData(data, true);
    this.host.dataset.points = data[0].length; // what is drawn, for tests and for who inspects the page
  }

  resize() {
    const { width, height } = this.#size();
    if (width !== this.plot.width || height !== this.plot.height) this.plot.setSize({ width, height });
  }

  destroy() {
    this.plot.destroy();
  }
}

function tick(v) {
  return Number.isInteger(v) ? figureTick(v) : String(Number(v.toPrecision(3)));
}

function figureTick(v) {
  return v >= 1000 ? figure(v) : String(v);
}

