// The charts of two runs side by side: in the place of each SVG from Python the same by uPlot, with one cursor for all
// that share an axis.

import { readout, sums } from "./bench_state.js";
import { Chart, join, stepped } from "./chart.js";
import { element } from "./dom.js";
import { figure, grouped } from "./format.js";

const X_AXIS_PX = 24;
let count = 0;

/** Draws them into the `.gp-chart`s of `root`, which stand in the same order; returns what draws them again and ends them. */
export function drawCharts(root, charts) {
  const group = `gpulab-sides-${++count}`;
  const hosts = root.querySelectorAll(".gp-chart");
  const drawn = charts.map((data, i) => new Curves(hosts[i], data, group));
  const observer = new ResizeObserver(() => drawn.forEach((one) => one.chart.resize()));
  drawn.forEach((one) => observer.observe(one.plot));
  return {
    draw: () => drawn.forEach((one) => one.draw()),
    end() {
      observer.disconnect();
      drawn.forEach((one) => one.chart.destroy());
    },
  };
}

class Curves {
  constructor(host, data, group) {
    this.data = data;
    const svg = host.querySelector("svg");
    this.plot = element("div", "gp-plot");
    this.plot.style.height = `${parseFloat(svg.style.height) + X_AXIS_PX}px`;
    svg.replaceWith(this.plot);
    const foot = element("div", "gp-foot", null);
    this.readout = element("span", "", foot);
    if (this.plot.nextSibling) foot.append(this.plot.nextSibling); // what Python says of the axis
    host.append(foot);
    const { stacked, xUnit } = data;
    this.lines = stacked ? sums(data.lines) : data.lines;
    this.chart = new Chart(this.plot, {
      lines: this.lines.map((line) => ({
        color: () => line.colour,
        points: false,
        ...(stacked ? { fill: () => line.colour, width: 0, paths: stepped } : { dash: line.dashed ? [6, 4] : undefined }),
      })),
      syncKey: `${group}-${xUnit}`,
      labels: { values: (_, values) => values.map((v) => (xUnit === "s" ? `${v} s` : grouped(v))) },
      onCursor: () => this.#tell(),
    });
    this.draw();
  }

  draw() {
    const { xEnd, low, top } = this.data;
    const around = top > low ? 0 : Math.abs(top) || 1; // a line of one value stands in the middle
    this.chart.draw(join(this.lines.map(({ x, y }) => [x, y])), xEnd, top + around, low - around);
  }

  #tell() {
    const { left } = this.chart.plot.cursor;
    this.readout.textContent = left >= 0 ? readout(this.data, this.chart.plot.posToVal(left, "x"), figure) : "";
    this.readout.title = this.readout.textContent;
  }
}
