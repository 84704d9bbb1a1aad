// Plots: uPlot with the page's colours, a custom legend, and one shared cursor.

import uPlot from './vendor/uPlot.esm.js';
import { el, text } from './dom.js';
import { NONE } from './units.js';

const HEIGHT = 170;
const SYNC = 'larder';

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Creates a small line without axes, `points` samples wide. */
export function sparkline(points) {
  const canvas = el('canvas', { width: 240, height: 56, 'aria-hidden': 'true' });
  return {
    element: canvas,
    draw(values) {
      const context = canvas.getContext('2d');
      const { width, height } = canvas;
      context.clearRect(0, 0, width, height);
      const highest = Math.max(1, ...values.map((value) => value ?? 0));
      context.strokeStyle = colour('--read');
      context.lineWidth = 3;
      context.lineJoin = 'round';
      context.beginPath();
      let isDown = false;
      values.forEach((value, at) => {
        if (value === null) {
          isDown = false;
          return;
        }
        const x = ((points - values.length + at) / (points - 1)) * (width - 4) + 2;
        const y = height - 3 - (value / highest) * (height - 6);
        if (isDown) context.lineTo(x, y);
        else context.moveTo(x, y);
        isDown = true;
      });
      context.stroke();
    },
  };
}

/** Creates a figure with a title, a legend of `series` ([name, colour, dashed]), and a plot below. */
function figure(title, series, tell) {
  const values = series.map(() => el('b', {}, NONE));
  const legend = el('ul', { class: 'legend' });
  series.forEach(([name, colourName, isDashed], at) => {
    const mark = el('i', { class: isDashed ? 'mark dashed' : 'mark', 'aria-hidden': 'true' });
    mark.style.setProperty('--mark', `var(${colourName})`);
    legend.append(el('li', {}, mark, name, ' ', values[at]));
  });
  const place = el('div', { class: 'plot', role: 'img', 'aria-label': `${title}, over time` });
  const element = el('figure', { 'data-title': title }, el('figcaption', {}, title), legend, place);
  return {
    element,
    place,
    tell(at, row) {
      values.forEach((value, place) => text(value, tell(row[place + 1][at] ?? null)));
    },
  };
}

/** Removes trailing zeros after the decimal point. */
const short = (words) => words.replace(/\.(\d*?)0+(?=\s|$)/, (_, rest) => (rest ? `.${rest}` : ''));

/** Returns the powers of two from `low` to `high`, thinned out to five. */
function powersOfTwo(low, high) {
  const [first, last] = [Math.ceil(Math.log2(low)), Math.floor(Math.log2(high))];
  const step = Math.max(1, Math.ceil((last - first + 1) / 5));
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, at) => 2 ** (first + at * step));
}

function axes(tell, isTime, tellX) {
  const common = {
    stroke: () => colour('--muted'),
    grid: { stroke: () => colour('--grid'), width: 1 },
    ticks: { show: false },
    font: '12px system-ui, sans-serif',
  };
  const x = { ...common, space: 64, size: 28 };
  if (isTime) {
    x.incrs = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900];
    x.values = (_, all, __, ___, step) => all.map((at) => new Date(at * 1000).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', second: step < 60 ? '2-digit' : undefined, hour12: false }));
  } else {
    x.values = (_, all) => all.map((value) => (value === null ? null : short(tellX(value))));
    x.splits = (_, __, low, high) => powersOfTwo(low, high);
    // Without a filter uPlot would label only some of them.
    x.filter = (_, all) => all;
  }
  return [x, { ...common, size: 70, gap: 4, space: 34, values: (_, all) => all.map((value) => (value === null ? null : short(tell(value)))) }];
}

const wide = (element) => Math.max(200, Math.floor(element.clientWidth));

/** Returns the bounds and grid lines of the y axis: from 0, in round steps of the unit; for a ratio, from 0 to 1. */
function yScale(kind) {
  switch (kind) {
    case 'ratio':
      return { scale: { range: [0, 1] }, splits: () => [0, 0.25, 0.5, 0.75, 1] };
    case 'share':
      return { scale: { range: (_, __, high) => [0, Math.min(1, Math.max(0.02, (high || 0) * 1.08))] } };
    case 'time':
      return {
        scale: {
          distr: 3,
          log: 10,
          range: (_, low, high) => (low === null || high === null || !(high > 0) ? [1e-6, 1e-2] : [10 ** Math.floor(Math.log10(Math.max(low, 1e-9))), 10 ** Math.ceil(Math.log10(high * 1.01))]),
        },
        // One grid line for each power of ten.
        splits: (_, __, low, high) => {
          const [first, last] = [low, high].map((it) => Math.round(Math.log10(it)));
          return Array.from({ length: last - first + 1 }, (___, at) => 10 ** (first + at));
        },
      };
    default: {
      const base = kind === 'bytes' ? 2 : 10;
      const step = (high) => {
        const rough = high / 4;
        const power = base ** Math.floor(Math.log(rough) / Math.log(base));
        return base === 2 ? power * (rough > power ? 2 : 1) : [1, 2, 5, 10].map((it) => it * power).find((it) => it >= rough);
      };
      return {
        scale: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : base === 2 ? 1024 : 10] },
        splits: (_, __, low, high) => {
          const by = step(high);
          return Array.from({ length: Math.floor(high / by) + 1 }, (___, at) => at * by);
        },
      };
    }
  }
}

function draw(shape, options, data) {
  const plot = new uPlot({ width: wide(shape.place), height: HEIGHT, legend: { show: false }, padding: [8, 26, 0, 0], ...options }, data, shape.place);
  const observer = new ResizeObserver(() => {
    const width = wide(shape.place);
    if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
  });
  observer.observe(shape.place);
  return {
    plot,
    close() {
      observer.disconnect();
      plot.destroy();
    },
  };
}

const line = ([name, colourName, isDashed]) => ({
  label: name,
  stroke: () => colour(colourName),
  width: isDashed ? 1.2 : 1.8,
  dash: isDashed ? [4, 4] : undefined,
  points: { show: false },
  spanGaps: false,
});

/** Creates a plot over time; `kind` is count, bytes, time, share or ratio. */
export function timePlot(title, series, kind, tell) {
  const shape = figure(title, series, tell);
  const y = yScale(kind);
  const [xAxis, yAxis] = axes(tell, true);
  if (y.splits) yAxis.splits = y.splits;
  let drawn = null;
  let data = [[], ...series.map(() => [])];
  let bounds = null;
  const tellCursor = (plot) => shape.tell(plot.cursor.idx ?? data[0].length - 1, data);
  const options = {
    scales: { x: { time: true, range: () => bounds || [0, 1] }, y: y.scale },
    axes: [xAxis, yAxis],
    series: [{}, ...series.map(line)],
    cursor: { sync: { key: SYNC }, drag: { x: false, y: false }, points: { size: 6 } },
    hooks: { setCursor: [tellCursor] },
  };
  shape.element.larder = () => data;
  return {
    element: shape.element,
    /** Sets the data: a row of times in seconds, then a row for each series. `range` is the first and last time shown. */
    set(rows, range) {
      [data, bounds] = [rows, range];
      if (!drawn && shape.place.isConnected) drawn = draw(shape, options, data);
      drawn?.plot.setData(data);
      if (drawn) tellCursor(drawn.plot);
    },
    redraw: () => drawn?.plot.redraw(false, true),
    close: () => drawn?.close(),
  };
}

/** Creates a plot of the miss ratio by cache size, with a mark at the current size. */
export function curvePlot(title, series, tell, tellX, mark) {
  const shape = figure(title, [series], tell);
  shape.place.setAttribute('aria-label', `${title}, by size of the cache`);
  const y = yScale('ratio');
  const [xAxis, yAxis] = axes(tell, false, tellX);
  Object.assign(yAxis, { splits: y.splits });
  let drawn = null;
  let at = null;
  let data = [[], []];
  const drawMark = (plot) => {
    if (at === null) return;
    const { ctx, bbox } = plot;
    const x = Math.round(plot.valToPos(at, 'x', true));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour('--write');
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    const words = `${mark} ${tellX(at)}`;
    const isRight = x + ctx.measureText(words).width + 12 * devicePixelRatio > bbox.left + bbox.width;
    ctx.textAlign = isRight ? 'right' : 'left';
    ctx.fillText(words, x + (isRight ? -6 : 6) * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
    ctx.restore();
  };
  const nearest = () => data[0].reduce((best, size, place) => (Math.abs(size - at) < Math.abs(data[0][best] - at) ? place : best), 0);
  const tellCursor = (plot) => shape.tell(plot.cursor.idx ?? nearest(), data);
  const options = {
    scales: {
      x: { time: false, distr: 3, log: 2, range: (_, low, high) => [Math.min(low, at ?? low) / 1.1, Math.max(high, at ?? high) * 1.1] },
      y: y.scale,
    },
    axes: [xAxis, yAxis],
    series: [{}, { ...line(series), points: { show: true, size: 5 } }],
    cursor: { drag: { x: false, y: false } },
    hooks: { setCursor: [tellCursor], draw: [drawMark] },
  };
  shape.element.larder = () => [...data, at];
  return {
    element: shape.element,
    /** Sets the curve and the current size. */
    set(rows, now) {
      const isSame = at === now && rows.every((row, place) => row.length === data[place].length && row.every((value, it) => value === data[place][it]));
      if (isSame && drawn) return;
      [data, at] = [rows, now];
      if (!drawn && shape.place.isConnected) drawn = draw(shape, options, data);
      drawn?.plot.setData(data);
      if (drawn) tellCursor(drawn.plot);
    },
    redraw: () => drawn?.plot.redraw(false, true),
    close: () => drawn?.close(),
  };
}
