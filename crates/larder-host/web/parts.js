// Elements that the sections of a VM's page share: facts, and plots over the time that is shown.

import { el, text } from './dom.js';
import { timePlot } from './plot.js';

const SAMPLES_MAX = 1800;
const SHOWN_MIN = 60;

/** Creates a list of names, each with a value. */
export function facts(names) {
  const values = new Map(names.map((name) => [name, el('dd')]));
  const element = el('dl', { class: 'facts' });
  for (const [name, value] of values) element.append(el('div', {}, el('dt', {}, name), value));
  return { element, set: (name, value) => text(values.get(name), value) };
}

/** Creates plots over time. Each has: title, kind, function that formats values, and series: name, colour, function of a sample, whether the line is dashed. */
export function timeline(all, spanOf) {
  const plots = all.map(([title, kind, tell, series]) => ({
    series,
    plot: timePlot(title, series.map(([label, colour, , isDashed]) => [label, colour, isDashed]), kind, tell),
  }));
  const times = [];
  const samples = [];

  function draw() {
    if (!times.length) return;
    // A short history is not preceded by an empty half hour.
    const length = Math.min(spanOf(), Math.max(SHOWN_MIN, times.at(-1) - times[0]));
    const range = [times.at(-1) - length, times.at(-1)];
    const first = Math.max(0, times.findIndex((time) => time >= range[0]) - 1);
    const shownTimes = times.slice(first);
    const shown = samples.slice(first);
    for (const { plot, series } of plots) {
      const at = (take) => shown.map(([rates, rest]) => (rates ? take(rates, rest) ?? null : null));
      plot.set([shownTimes, ...series.map(([, , take]) => at(take))], range);
    }
  }

  return {
    plots: plots.map(({ plot }) => plot),
    /** Adds a sample: rates, and other plotted values. Returns whether it is newer than the last one. */
    add(time, rates, rest) {
      if (times.length && time <= times.at(-1)) return false;
      times.push(time);
      samples.push([rates, rest]);
      if (times.length > SAMPLES_MAX) {
        times.shift();
        samples.shift();
      }
      draw();
      return true;
    },
    draw,
    /** Begins a gap: there are no data from now on. */
    gap() {
      if (!times.length || samples.at(-1)[0] === null) return;
      // Uses the host's clock, which may differ from the browser's.
      times.push(times.at(-1) + 0.001);
      samples.push([null, {}]);
      draw();
    },
    redraw: () => plots.forEach(({ plot }) => plot.redraw()),
    close: () => plots.forEach(({ plot }) => plot.close()),
  };
}
