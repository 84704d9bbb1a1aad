// Memory of a VM over time.

import { el, show, text } from './dom.js';
import { facts, timeline } from './parts.js';
import { NONE, age, bandwidth, bytes, count, percent, seconds } from './units.js';

const PAGE = 4096;

const PLOTS = [
  ['Memory', 'bytes', bytes, [
    ['used', '--memory', (_, it) => it.used],
    ['resident', '--read', (_, it) => it.resident],
    ['compressed', '--cache', (_, it) => it.compressed.used],
    ['budget', '--write', (_, it) => it.budget, true],
  ]],
  ['Time lost by waiting for memory', 'share', percent, [
    ['some', '--write', (it) => it.some],
    ['full', '--bad', (it) => it.full],
  ]],
  ['Faults per second', 'count', count, [
    ['compressed', '--cache', (it) => it.compressed.per_second],
    ['disk', '--disk', (it) => it.disk.per_second],
    ['zeros, one word', '--memory', (it) => it.zero.per_second + it.uniform.per_second],
    ['write', '--write', (it) => it.write.per_second],
  ]],
  ['Fault latency', 'time', seconds, [
    ['compressed', '--cache', (it) => it.compressed.p50_seconds],
    ['p99', '--cache', (it) => it.compressed.p99_seconds, true],
    ['disk', '--disk', (it) => it.disk.p50_seconds],
    ['p99', '--disk', (it) => it.disk.p99_seconds, true],
  ]],
  ['Pages per second', 'count', count, [
    ['evicted', '--write', (it) => it.evicted],
    ['refaults', '--bad', (it) => it.refaults],
    ['ahead', '--memory', (it) => it.ahead],
  ]],
  ['To and from its disks', 'bytes', bandwidth, [
    ['swap cache written', '--write', (it) => it.swap_written],
    ['read', '--read', (it) => it.swap_read],
    ['slow store written', '--write', (it) => it.slow_written, true],
    ['read', '--read', (it) => it.slow_read, true],
  ]],
];

const TIERS = { 'swap-cache': 'Swap cache', 'slow-store': 'Slow store' };

function compressedText({ pages, used, limit, ratio }) {
  const shrunk = ratio === null ? '' : `, ${ratio.toFixed(2)} to 1`;
  return `${bytes(pages * PAGE)} in ${bytes(used)} of at most ${bytes(limit)}${shrunk}`;
}

function diskText(disk) {
  if (!disk) return 'none';
  const failed = disk.failed ? 'cannot be written to: ' : '';
  return `${failed}${bytes(disk.live)} of at most ${bytes(disk.limit)} (${disk.file}); ${bytes(disk.written)} written, ${bytes(disk.written_per_day)} a day`;
}

function moveText({ up, down, last }, now) {
  if (!last) return 'none by this larder host';
  return `${count(up)} up, ${count(down)} down; the last ${age(last.time_ms, now)} ago, from ${bytes(last.from)} to ${bytes(last.to)}: ${last.why}`;
}

const lostText = (lost) => `${percent(lost.avg10)} of 10 s, ${percent(lost.avg60)} of 60 s, ${percent(lost.avg300)} of 300 s; ${seconds(lost.total)} in all`;

const boundsText = (bounds) => (bounds ? Object.entries(bounds).map(([name, value]) => `${name} ${bytes(value)}`).join(', ') : 'the budget is not moved');

/** Creates the memory section of a VM's page. */
export function memoryPart(spanOf) {
  const about = facts(['Process', 'Size', 'Used', 'Budget', 'Budget moves', 'Moved', 'Compressed', TIERS['swap-cache'], TIERS['slow-store'], 'Lost, some', 'Lost, full', 'Refaults', 'Lost pages', 'Stalled']);
  const past = timeline(PLOTS, spanOf);
  const problem = el('p', { class: 'alert', role: 'status' });
  show(problem, false);
  const grid = el('div', { class: 'plots' }, ...past.plots.map((plot) => plot.element));
  const element = el('section', { class: 'disk', id: 'memory', 'aria-label': 'Memory' }, el('h2', {}, 'Memory'), problem, about.element, grid);
  return {
    element,
    set(it) {
      about.set('Process', `${it.process} (${it.pid})${it.detaching ? ', all is being brought back' : ''}`);
      about.set('Size', bytes(it.size));
      about.set('Used', `${bytes(it.used)}, resident ${bytes(it.resident)}`);
      about.set('Budget', bytes(it.budget));
      about.set('Budget moves', boundsText(it.bounds));
      about.set('Moved', moveText(it.moves, it.time_ms));
      about.set('Compressed', compressedText(it.compressed));
      for (const [tier, name] of Object.entries(TIERS)) about.set(name, diskText(it.disks.find((disk) => disk.tier === tier)));
      about.set('Lost, some', lostText(it.some));
      about.set('Lost, full', lostText(it.full));
      about.set('Refaults', `${count(it.refaults)} of ${count(it.evicted_pages)} evicted pages`);
      about.set('Lost pages', it.lost_pages ? count(it.lost_pages) : 'none');
      about.set('Stalled', it.stalled ? count(it.stalled) : NONE);
      text(problem, it.problem ? `The budget is not kept: ${it.problem}.` : '');
      show(problem, Boolean(it.problem));
      element.classList.toggle('failed', it.lost_pages > 0 || it.disks.some((disk) => disk.failed));
      past.add(it.time_ms / 1000, it.rates, { used: it.used, resident: it.resident, budget: it.budget, compressed: it.compressed });
    },
    draw: past.draw,
    gap: past.gap,
    redraw: past.redraw,
    close: past.close,
  };
}
