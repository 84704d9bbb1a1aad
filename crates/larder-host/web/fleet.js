// Page with all VMs of the host.

import { badge, el, show, text } from './dom.js';
import { moveLinks } from './migration.js';
import { sparkline } from './plot.js';
import { NONE, bandwidth, bytes, count, percent, seconds } from './units.js';

const HISTORY = 120;

const add = (a, b) => (a === undefined ? b : a + b);
const iops = (vm) => (vm.totals ? vm.totals.reads_s + vm.totals.writes_s : null);
const rate = (vm) => (vm.totals ? vm.totals.read_bytes_s + vm.totals.write_bytes_s : null);

/** Columns: key, name, function that returns the sort value, and function that formats it. */
const COLUMNS = [
  ['name', 'VM', (vm) => vm.name],
  ['health', 'State', (vm) => vm.health],
  ['iops', 'IOPS', iops, count],
  ['rate', 'Bandwidth', rate, bandwidth],
  ['mean', 'Mean latency', (vm) => vm.totals?.mean ?? null, seconds],
  ['p99', 'p99', (vm) => vm.totals?.p99 ?? null, seconds],
  ['hit', 'Cache hits', (vm) => vm.totals?.cache_hit_ratio ?? null, percent],
  ['dirty', 'Dirty', (vm) => vm.totals?.cache?.dirty ?? null, bytes],
  ['memory', 'Memory', (vm) => vm.memory?.used ?? null, bytes],
  ['lost', 'Lost, 60 s', (vm) => vm.memory?.some_60s ?? null, percent],
  ['errors', 'Errors', (vm) => vm.totals?.errors ?? null, count],
];

function compare(a, b, by, sign) {
  const [x, y] = [by(a), by(b)];
  if (x === null || y === null) return x === y ? a.name.localeCompare(b.name) : x === null ? 1 : -1;
  const order = typeof x === 'string' ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
  return order === 0 ? a.name.localeCompare(b.name) : sign * order;
}

/** Describes the problem of a VM that is up, if it has one. */
function trouble({ totals, memory }) {
  if (totals?.cache?.failed) return 'its cache has failed';
  if (memory?.lost_pages) return 'pages of its memory are lost';
  if (memory?.failed) return 'a disk of its memory has failed';
  return memory?.problem ? `its memory: ${memory.problem}` : '';
}

function makeRow(vm) {
  const state = badge();
  const history = [];
  const line = sparkline(HISTORY);
  const cells = new Map();
  const link = el('a', { href: `#/vm/${encodeURIComponent(vm.name)}` }, vm.name);
  const why = el('span', { class: 'why' });
  const row = el('tr', {}, el('th', { scope: 'row' }, link), el('td', { 'data-name': 'State' }, state.element, why));
  for (const [key, name, , tell] of COLUMNS) {
    if (!tell) continue;
    const cell = el('td', { class: 'number', 'data-name': name, 'data-key': key });
    cells.set(key, cell);
    row.append(cell);
  }
  row.append(el('td', { class: 'line', 'data-name': 'IOPS, 2 min' }, line.element));
  return {
    element: row,
    update(vm) {
      state.set(vm.health, vm.why);
      text(why, vm.health === 'up' ? trouble(vm) || vm.moving || '' : vm.why || '');
      for (const [key, , by, tell] of COLUMNS) {
        if (tell) text(cells.get(key), tell(by(vm)));
      }
      cells.get('errors').classList.toggle('bad', vm.totals?.errors > 0);
      history.push(iops(vm));
      if (history.length > HISTORY) history.shift();
      line.draw(history);
    },
    redraw: () => line.draw(history),
  };
}

function makeTotals() {
  const names = ['VMs up', 'IOPS', 'Read', 'Written', 'Worst p99', 'Dirty in caches', 'Memory', 'Needs attention'];
  const values = new Map(names.map((name) => [name, el('dd')]));
  const element = el('dl', { class: 'totals' });
  for (const [name, value] of values) element.append(el('div', {}, el('dt', {}, name), value));
  return {
    element,
    update(vms) {
      const up = vms.filter((vm) => vm.totals);
      const sum = (of) => up.reduce((all, vm) => add(all, of(vm)), 0);
      const longest = up.map((vm) => vm.totals.p99).filter((time) => time !== null);
      const bad = vms.filter((vm) => ['stuck', 'killed'].includes(vm.health) || trouble(vm));
      const memories = vms.map((vm) => vm.memory).filter(Boolean);
      text(values.get('VMs up'), `${vms.filter((vm) => vm.health === 'up').length} of ${vms.length}`);
      text(values.get('IOPS'), count(sum(iops)));
      text(values.get('Read'), bandwidth(sum((vm) => vm.totals.read_bytes_s)));
      text(values.get('Written'), bandwidth(sum((vm) => vm.totals.write_bytes_s)));
      text(values.get('Worst p99'), seconds(longest.length ? Math.max(...longest) : null));
      text(values.get('Dirty in caches'), bytes(sum((vm) => vm.totals.cache?.dirty || 0)));
      text(values.get('Memory'), memories.length ? bytes(memories.reduce((all, it) => all + it.used, 0)) : NONE);
      text(values.get('Needs attention'), bad.length ? `${bad.length} VM${bad.length > 1 ? 's' : ''}` : 'nothing');
      values.get('Needs attention').classList.toggle('bad', bad.length > 0);
    },
  };
}

/** Creates the page with all VMs. */
export function fleetPage() {
  const rows = new Map();
  const totals = makeTotals();
  let frame = null;
  let sort = ['name', 1];

  const search = el('input', { id: 'search', type: 'search', placeholder: 'Search VMs', 'aria-label': 'Search VMs by name, UUID or state', input: () => draw() });
  const chosen = el('select', { id: 'sort', 'aria-label': 'Sort by', change: () => sortBy(chosen.value) });
  const heads = new Map();
  const head = el('tr');
  for (const [key, name, , tell] of COLUMNS) {
    const button = el('button', { type: 'button', click: () => sortBy(key) }, name);
    const cell = el('th', { scope: 'col', class: tell ? 'number' : null }, button);
    heads.set(key, cell);
    head.append(cell);
    chosen.append(el('option', { value: key }, `by ${name}`));
  }
  head.append(el('th', { scope: 'col', class: 'line' }, 'IOPS, 2 min'));
  const body = el('tbody');
  const table = el('div', { class: 'scroll' }, el('table', { class: 'fleet' }, el('thead', {}, head), body));
  const note = el('div', { class: 'empty' });
  const leftOut = el('p', { class: 'empty', id: 'left-out', role: 'status' });
  const others = el('ul');
  const aside = el('details', { class: 'others' }, el('summary'), others);
  const tools = el('div', { class: 'tools' }, search, chosen);
  const moves = moveLinks('vm');
  const ofMoves = el('section', { 'aria-label': 'Moves', id: 'moves' }, el('h2', {}, 'Moves'), moves.element);
  show(ofMoves, false);
  const element = el('section', { 'aria-label': 'All VMs' }, el('h1', { class: 'hidden' }, 'All VMs'), totals.element, ofMoves, tools, table, note, leftOut, aside);
  show(aside, false);
  show(leftOut, false);
  explain();

  function sortBy(key) {
    sort = [key, sort[0] === key ? -sort[1] : key === 'name' || key === 'health' ? 1 : -1];
    chosen.value = key;
    draw();
  }

  function explain() {
    show(table, Boolean(frame?.vms.length));
    show(tools, Boolean(frame?.vms.length));
    const wanted = !frame ? 'wait' : !frame.vms.length ? 'none' : !body.childElementCount ? 'search' : '';
    show(note, wanted !== '');
    if (note.dataset.of === wanted) return;
    note.dataset.of = wanted;
    note.replaceChildren(
      ...(wanted === 'none'
        ? [el('h2', {}, 'No VM is served here yet'), el('p', {}, 'Describe one in /etc/larder/vms/NAME.toml and start it; it shows up here by itself:'), el('pre', {}, 'larder vm NAME')]
        : [el('p', {}, wanted === 'search' ? 'No VM is called that.' : 'Asking the VMs…')]),
    );
  }

  function draw() {
    if (!frame) return;
    const [key, sign] = sort;
    const by = COLUMNS.find(([name]) => name === key)[2];
    const wanted = search.value.trim().toLowerCase();
    const fits = (vm) => [vm.name, vm.uuid || '', vm.health].some((it) => it.toLowerCase().includes(wanted));
    const shown = frame.vms.filter(fits).sort((a, b) => compare(a, b, by, sign));
    const elements = shown.map((vm) => rows.get(vm.name).element);
    // Rows are replaced only if the order changed, so that an unchanged row keeps its focus.
    if (elements.length !== body.children.length || elements.some((row, at) => row !== body.children[at])) {
      const focused = document.activeElement;
      body.replaceChildren(...elements);
      if (body.contains(focused)) focused.focus();
    }
    for (const [name, cell] of heads) {
      if (name === key) cell.setAttribute('aria-sort', sign > 0 ? 'ascending' : 'descending');
      else cell.removeAttribute('aria-sort');
    }
    explain();
  }

  function hear(told) {
    frame = told;
    const names = new Set(told.vms.map((vm) => vm.name));
    for (const name of rows.keys()) if (!names.has(name)) rows.delete(name);
    for (const vm of told.vms) {
      if (!rows.has(vm.name)) rows.set(vm.name, makeRow(vm));
      rows.get(vm.name).update(vm);
    }
    totals.update(told.vms);
    moves.set(told.migrations);
    show(ofMoves, told.migrations.length > 0);
    const { sockets, stopped } = told.left_out;
    const parts = [sockets && `${sockets} with a socket`, stopped && `${stopped} that do${stopped === 1 ? 'es' : ''} not run`].filter(Boolean);
    show(leftOut, parts.length > 0);
    text(leftOut, `Not shown, because 1024 are watched at most, and those that run come first: ${parts.join(', ')}.`);
    show(aside, told.others.length > 0);
    text(aside.firstChild, `${told.others.length} other socket${told.others.length === 1 ? '' : 's'}`);
    others.replaceChildren(...told.others.map((it) => el('li', {}, el('code', {}, it.socket), ` ${it.why || it.health}`)));
    draw();
  }

  return {
    title: 'Larder: all VMs',
    url: '/api/fleet',
    element,
    hears: { fleet: hear },
    redraw: () => rows.forEach((row) => row.redraw()),
  };
}
