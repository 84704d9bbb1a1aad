// Page of a VM: its disks and memory over time, and its events.

import { badge, el, show, text } from './dom.js';
import { memoryPart } from './memory.js';
import { moveLinks } from './migration.js';
import { facts, timeline } from './parts.js';
import { curvePlot } from './plot.js';
import { NONE, age, bandwidth, bytes, clock, count, percent, seconds } from './units.js';

const EVENTS_MAX = 200;
const SPANS = [[120, '2 min'], [300, '5 min'], [900, '15 min'], [1800, '30 min']];

/** Plots of a disk: title, kind, function that formats values, and series: name, colour, function of the rates, whether the line is dashed. */
const PLOTS = [
  ['Requests per second', 'count', count, [
    ['read', '--read', (it) => it.read.per_second],
    ['write', '--write', (it) => it.write.per_second],
  ]],
  ['Bandwidth', 'bytes', bandwidth, [
    ['read', '--read', (it) => it.read.bytes_per_second],
    ['write', '--write', (it) => it.write.bytes_per_second],
  ]],
  ['Read latency', 'time', seconds, [
    ['median', '--read', (it) => it.read.p50_seconds],
    ['p99', '--read', (it) => it.read.p99_seconds, true],
  ]],
  ['Write latency', 'time', seconds, [
    ['median', '--write', (it) => it.write.p50_seconds],
    ['p99', '--write', (it) => it.write.p99_seconds, true],
  ]],
  ['Hit ratios', 'ratio', percent, [
    ['cache', '--cache', (it) => it.cache_hits],
    ['read-ahead', '--memory', (it) => it.prefetch_hits],
  ]],
  ['Where reads come from', 'bytes', bandwidth, [
    ['memory', '--memory', (it) => it.tiers.memory],
    ['cache', '--cache', (it) => it.tiers.cache],
    ['disk', '--disk', (it) => it.tiers.disk],
  ]],
  ['Read-ahead', 'bytes', bandwidth, [
    ['fetched', '--memory', (it) => it.prefetch?.fetched],
    ['used', '--good', (it) => it.prefetch?.used],
    ['wasted', '--bad', (it) => it.prefetch?.wasted],
  ]],
];

const CACHE_PLOT = ['Held by the cache', 'bytes', bytes, [
  ['all', '--cache', (_, disk) => disk.cache?.occupancy],
  ['dirty', '--write', (_, disk) => disk.cache?.dirty],
]];

function exportsText(exports) {
  const parts = [];
  if (exports.vhost_user) parts.push(`vhost-user-blk, ${exports.vhost_user.connected ? 'connected' : 'nobody connected'}`);
  if (exports.nbd) parts.push(`NBD, ${exports.nbd.clients} client${exports.nbd.clients === 1 ? '' : 's'}`);
  return parts.join('; ') || 'nowhere';
}

const limitsText = (limits) => Object.entries(limits).map(([name, value]) => `${name} ${name.startsWith('bps') ? bytes(value) : count(value)}`).join(', ') || 'none';

const MODES = { wt: 'write-through', wb: 'write-back', wa: 'write-around', pt: 'pass-through' };

function diskPart(name, spanOf) {
  const about = facts(['Image', 'Size', 'Served', 'Limits', 'In flight', 'Errors', 'Cache', 'Written to the cache']);
  const past = timeline([...PLOTS, CACHE_PLOT], spanOf);
  const cachePlot = past.plots.at(-1);
  const curve = curvePlot('Miss ratio by size', ['would miss (LRU)', '--cache'], percent, bytes, 'now');
  const noCache = el('p', { class: 'hint' }, 'This disk has no cache. With cache = "/ssd/NAME.cache" in its file, what is read often is kept on a fast device.');
  const noCurve = el('p', { class: 'hint' }, 'The miss-ratio curve comes once the cache has seen enough reads.');
  const grid = el('div', { class: 'plots' }, ...past.plots.map((plot) => plot.element), curve.element);
  const element = el('section', { class: 'disk', 'aria-label': `Disk ${name}`, 'data-disk': name }, el('h2', {}, name), about.element, grid, noCache, noCurve);

  return {
    element,
    set(disk, time) {
      const { cache } = disk;
      about.set('Image', `${disk.image} (${disk.format}${disk.read_only ? ', read-only' : ''})`);
      about.set('Size', bytes(disk.size));
      about.set('Served', exportsText(disk.exports));
      about.set('Limits', limitsText(disk.limits));
      about.set('In flight', count(disk.in_flight));
      about.set('Errors', count(disk.counts.errors + (cache?.errors || 0)));
      about.set('Cache', cache ? `${cache.works ? '' : 'has failed: '}${cache.file} (${MODES[cache.mode] || cache.mode}), ${bytes(cache.occupancy)} of ${bytes(cache.capacity)}` : 'none');
      about.set('Written to the cache', cache ? `${bytes(cache.written)}${cache.endurance ? `, ${bytes(cache.endurance)} a day at most` : ''}` : NONE);
      element.classList.toggle('failed', cache ? !cache.works : false);
      const hasCurve = Boolean(cache?.miss_ratios.length);
      show(cachePlot.element, Boolean(cache));
      show(curve.element, hasCurve);
      show(noCache, !cache);
      show(noCurve, Boolean(cache) && !hasCurve);
      if (!past.add(time, disk.rates, { cache: cache && { occupancy: cache.occupancy, dirty: cache.dirty } })) return;
      if (hasCurve) curve.set([cache.miss_ratios.map((it) => it.capacity), cache.miss_ratios.map((it) => it.miss_ratio)], cache.capacity);
    },
    draw: past.draw,
    gap: past.gap,
    redraw() {
      past.redraw();
      curve.redraw();
    },
    close() {
      past.close();
      curve.close();
    },
  };
}

function eventList() {
  const list = el('ol', { class: 'events', reversed: true, tabindex: 0, 'aria-label': 'Events, the latest first' });
  const none = el('p', { class: 'hint' }, 'Nothing has been told yet.');
  return {
    element: el('section', { 'aria-label': 'Events' }, el('h2', {}, 'Events'), none, list),
    add(event) {
      show(none, false);
      const about = Object.entries(event.about).map(([name, value]) => `${name} ${value}`).join(', ');
      list.prepend(el('li', { 'data-level': event.level },
        el('time', { datetime: new Date(Math.min(event.time_ms, 8.64e15)).toISOString() }, clock(event.time_ms)),
        el('span', { class: 'level' }, event.level), el('span', {}, event.text, about ? el('small', {}, ` ${about}`) : null)));
      while (list.childElementCount > EVENTS_MAX) list.lastChild.remove();
    },
  };
}

/** Creates the page of the VM with this name. */
export function vmPage(name) {
  let span = 300;
  const disks = new Map();
  const state = badge();
  const why = el('p', { class: 'alert', role: 'status' });
  const about = facts(['UUID', 'Process', 'Up for', 'Larder', 'Socket']);
  const spans = el('div', { class: 'spans', role: 'group', 'aria-label': 'Time shown' });
  for (const [length, words] of SPANS) {
    spans.append(el('button', { type: 'button', 'aria-pressed': String(length === span), click: (event) => choose(length, event.currentTarget) }, words));
  }
  const parts = el('div');
  const ofMemory = el('div');
  let memory = null;
  const wait = el('p', { class: 'empty' }, 'Asking the VM…');
  const events = eventList();
  const moves = moveLinks('peer');
  const ofMoves = el('section', { 'aria-label': 'Moves', id: 'moves' }, el('h2', {}, 'Moves'), moves.element);
  show(ofMoves, false);
  show(why, false);
  const element = el('article', {},
    el('nav', { 'aria-label': 'Where this is' }, el('a', { href: '#/' }, '← All VMs')),
    el('div', { class: 'title' }, el('h1', {}, name), state.element, spans), why, about.element, ofMoves, wait, parts, ofMemory, events.element);

  function choose(length, button) {
    span = length;
    for (const other of spans.children) other.setAttribute('aria-pressed', String(other === button));
    disks.forEach((disk) => disk.draw());
    memory?.draw();
  }

  function gap() {
    disks.forEach((disk) => disk.gap());
    memory?.gap();
  }

  function hearMemory(told) {
    if (!told) {
      memory?.gap();
      return;
    }
    if (!memory) {
      memory = memoryPart(() => span);
      ofMemory.append(memory.element);
    }
    memory.set(told);
  }

  function hear({ vm, disks_up: areDisksUp, disks_time_ms: disksTime, disks: told, memory: toldMemory, migrations }) {
    moves.set(migrations);
    show(ofMoves, migrations.length > 0);
    const health = vm?.health || 'stopped';
    state.set(health, vm?.why);
    const words = vm ? vm.why : 'There is no VM of this name now. Its page goes on when it is started.';
    show(why, Boolean(words) && health !== 'up');
    text(why, words || '');
    show(wait, !told.length && !toldMemory && health === 'up');
    if (vm) {
      about.set('UUID', vm.uuid || 'none');
      about.set('Process', vm.pid === null ? NONE : String(vm.pid));
      about.set('Up for', vm.started_ms !== null && health === 'up' ? age(vm.started_ms, vm.time_ms) : NONE);
      about.set('Larder', vm.version || NONE);
      about.set('Socket', [vm.socket, vm.memory_socket].filter(Boolean).join(', '));
    }
    // If one of the VM's processes stops answering, the values of the other one are still updated.
    hearMemory(toldMemory);
    if (!areDisksUp) {
      disks.forEach((disk) => disk.gap());
      return;
    }
    const names = new Set(told.map((disk) => disk.name));
    for (const [disk, part] of disks) {
      if (names.has(disk)) continue;
      part.close();
      part.element.remove();
      disks.delete(disk);
    }
    for (const disk of told) {
      if (!disks.has(disk.name)) {
        const part = diskPart(disk.name, () => span);
        disks.set(disk.name, part);
        parts.append(part.element);
      }
      disks.get(disk.name).set(disk, disksTime / 1000);
    }
  }

  return {
    title: `${name} – Larder`,
    url: `/api/vm/${encodeURIComponent(name)}`,
    element,
    hears: { vm: hear, log: events.add },
    lost: gap,
    redraw() {
      disks.forEach((disk) => disk.redraw());
      memory?.redraw();
    },
    close() {
      disks.forEach((disk) => disk.close());
      memory?.close();
    },
  };
}
