// Page of a migration: its progress over time, its limits, and the methods that encode its pages, with the reasons.

import { el, show, text } from './dom.js';
import { facts, timeline } from './parts.js';
import { NONE, age, bandwidth, bytes, count, percent, seconds } from './units.js';

const SPANS = [[120, '2 min'], [300, '5 min'], [900, '15 min'], [1800, '30 min']];
/** Ways to send a page that are not an encoding method. */
const PLAIN = ['zero', 'same', 'delta', 'plain'];
const WAYS = { zero: 'zeros', same: 'of one word', delta: 'differences', plain: 'as they are' };
/** State of a VM after a failed migration. */
const PLACES = { here: 'it goes on here', there: 'it runs at the destination', 'in doubt': 'nobody knows whether it runs at the destination', between: 'a half of it is on either host', lost: 'it is lost, unless it runs at the destination', unknown: 'that was not found out' };

const number = (value) => (value === null || value === undefined ? NONE : value.toFixed(2));
const milliseconds = (value) => (value === null || value === undefined ? NONE : seconds(value / 1000));

const PLOTS = [
  ['Memory left', 'bytes', bytes, [
    ['left in this round', '--memory', (it) => it.remaining],
  ]],
  ['Bytes per second', 'bytes', bandwidth, [
    ['the guest changes', '--bad', (it) => it.dirty],
    ['go over', '--read', (it) => it.stream],
    ['on the link', '--write', (it) => it.wire],
    ['limit', '--muted', (it) => it.bandwidth, true],
  ]],
  ['Ratio', 'count', number, [
    ['now', '--cache', (it) => it.ratio],
    ['in all', '--cache', (it) => it.ratioInAll, true],
  ]],
  ['How pages go', 'ratio', percent, [
    ['one word', '--memory', (it) => it.ways?.uniform],
    ['differences', '--read', (it) => it.ways?.delta],
    ['encoded', '--cache', (it) => it.ways?.encoded],
    ['as they are', '--disk', (it) => it.ways?.plain],
  ]],
  ['Processors', 'count', number, [
    ['all', '--write', (it) => it.processors],
    ['encoding, or decoding', '--cache', (it) => it.encoding],
    ['limit', '--muted', (it) => it.most, true],
  ]],
  ['Downtime', 'time', seconds, [
    ['expected', '--bad', (it) => it.downtime],
    ['allowed', '--muted', (it) => it.allowed, true],
  ]],
];

/** Returns the rates between two states. */
function between(before, now) {
  const sums = (state) => (state.sent ? [state.sent.raw_bytes, state.sent.wire_bytes] : [state.delivered?.raw_bytes ?? 0, state.delivered?.wire_bytes ?? 0]);
  const time = (now.time_ns - (before?.time_ns ?? now.time_ns)) / 1e9;
  if (!(time > 0)) return { stream: null, wire: null, ways: null };
  const [raw, wire] = sums(now).map((sum, at) => Math.max(0, sum - sums(before)[at]));
  const pages = (state, wanted) => (state.sent?.methods ?? []).filter(({ method }) => wanted(method)).reduce((all, it) => all + it.pages, 0);
  const went = (wanted) => Math.max(0, pages(now, wanted) - pages(before, wanted));
  const all = went(() => true);
  const share = (wanted) => went(wanted) / all;
  const ways = all > 0 ? {
    uniform: share((it) => it === 'zero' || it === 'same'),
    delta: share((it) => it === 'delta'),
    encoded: share((it) => !PLAIN.includes(it)),
    plain: share((it) => it === 'plain'),
  } : null;
  return { stream: raw / time, wire: wire / time, ways };
}

/** Returns the plotted values of a state. */
function sample(before, state, ratioInAll) {
  const done = between(before, state);
  const { course, rates, limits } = state;
  return {
    remaining: course?.remaining_bytes,
    dirty: course?.dirty_bytes_per_s,
    stream: rates?.stream_bytes_per_s ?? done.stream,
    wire: rates?.wire_bytes_per_s ?? done.wire,
    bandwidth: limits?.bandwidth,
    ratio: done.wire > 0 ? done.stream / done.wire : null,
    ratioInAll,
    ways: done.ways,
    processors: rates?.processors,
    encoding: rates?.encoding,
    most: limits?.processors,
    downtime: course?.expected_downtime_ms === null || course?.expected_downtime_ms === undefined ? null : course.expected_downtime_ms / 1000,
    allowed: limits?.downtime_ms ? limits.downtime_ms / 1000 : null,
  };
}

function limitsText(limits) {
  if (!limits) return 'the source has them';
  const all = [
    limits.bandwidth !== null && `${bandwidth(limits.bandwidth)} on the link`,
    limits.processors !== null && `${limits.processors} CPUs`,
    limits.downtime_ms !== null && `a downtime of ${milliseconds(limits.downtime_ms)}`,
    limits.timeout_s !== null && `${seconds(limits.timeout_s)} in all`,
  ];
  return all.filter(Boolean).join(', ') || 'none';
}

/** Creates a table with a head, whose rows are replaced by each `set`. */
function table(name, heads) {
  const body = el('tbody');
  const head = el('tr', {}, ...heads.map(([words, isNumber]) => el('th', { scope: 'col', class: isNumber ? 'number' : null }, words)));
  const element = el('section', { 'aria-label': name }, el('h2', {}, name), el('div', { class: 'scroll' }, el('table', { class: 'fleet evidence' }, el('thead', {}, head), body)));
  show(element, false);
  return {
    element,
    set(rows) {
      show(element, rows.length > 0);
      body.replaceChildren(...rows.map((row) => el('tr', {}, ...row.map((words, at) => el(at ? 'td' : 'th', { class: heads[at][1] ? 'number' : null, scope: at ? null : 'row', 'data-name': heads[at][0] }, words)))));
    },
  };
}

/** Creates the page of a migration. */
export function migrationPage(key) {
  let span = 300;
  let before = null;
  const name = key.replace(/\.(leaving|coming)$/, '');
  const state = el('span', { class: 'badge' });
  const why = el('p', { class: 'alert', role: 'status' });
  const about = facts(['Goes', 'QEMU', 'Since', 'Round', 'Left', 'To go', 'Stood still', 'Limits', 'Sent', 'CPU time']);
  const spans = el('div', { class: 'spans', role: 'group', 'aria-label': 'Time shown' });
  const past = timeline(PLOTS, () => span);
  for (const [length, words] of SPANS) {
    spans.append(el('button', { type: 'button', 'aria-pressed': String(length === span), click: (event) => choose(length, event.currentTarget) }, words));
  }
  const ways = table('How pages went', [['Way'], ['Pages', true], ['Share', true], ['On the link', true], ['Of a page', true]]);
  const evidence = table('Why', [['Pages'], ['Batches', true], ['Goes by'], ['What each method would cost for a page: encoding, and the bytes that are left']]);
  const price = el('p', { class: 'hint' });
  const wait = el('p', { class: 'empty' }, 'Asking who moves it…');
  const grid = el('div', { class: 'plots' }, ...past.plots.map((plot) => plot.element));
  const vmLink = el('a', { href: `#/vm/${encodeURIComponent(name)}` }, name);
  show(why, false);
  const element = el('article', { id: 'migration' },
    el('nav', { 'aria-label': 'Where this is' }, el('a', { href: '#/' }, '← All VMs'), ' · ', vmLink),
    el('div', { class: 'title' }, el('h1', {}, `Move of ${name}`), state, spans), why, about.element, wait, grid, ways.element, evidence.element, price);

  function choose(length, button) {
    span = length;
    for (const other of spans.children) other.setAttribute('aria-pressed', String(other === button));
    past.draw();
  }

  function explain({ health, why: reason, state: it }) {
    const ended = it.reason ? `It has failed: ${it.reason}.` : '';
    const place = it.place && it.phase === 'failed' ? ` The VM: ${PLACES[it.place] || it.place}.` : '';
    const words = ended + place || (health !== 'up' && it.phase !== 'done' ? reason : it.course?.verdict) || '';
    show(why, Boolean(words));
    text(why, words);
  }

  function tellWays(sent) {
    const all = (sent?.methods ?? []).filter((it) => it.pages > 0);
    const pages = all.reduce((sum, it) => sum + it.pages, 0);
    ways.set(all.map((it) => [WAYS[it.method] || it.method, count(it.pages), percent(it.pages / pages), bytes(it.bytes), bytes(it.bytes / it.pages)]));
  }

  function tellEvidence(told) {
    const offer = (it) => `${WAYS[it.method] || it.method} ${seconds(it.cost_ns / 1e9)} (${number(it.ratio)}x, ${seconds(it.ns / 1e9)})`;
    const classes = told?.classes ?? [];
    evidence.set(classes.map((it) => [it.class, count(it.batches), WAYS[it.method] || it.method, [...it.offers].sort((a, b) => a.cost_ns - b.cost_ns).map(offer).join('; ')]));
    text(price, classes.length ? `A byte on the link is worth ${number(told.ns_per_byte)} ns of encoding now. What costs least is picked; a region whose pages come out longer or shorter than others like them may go by another method.` : '');
  }

  function hear({ migration }) {
    show(wait, !migration);
    text(wait, 'There is no such move now. The page goes on when there is one.');
    if (!migration) {
      past.gap();
      return;
    }
    const { state: it, words, health, ratio } = migration;
    const isOver = ['done', 'failed'].includes(it.phase);
    state.dataset.health = it.phase === 'failed' || health === 'killed' ? 'killed' : health === 'stuck' ? 'stuck' : isOver ? 'stopped' : 'up';
    text(state, words);
    explain(migration);
    about.set('Goes', `${it.direction === 'leaving' ? 'to' : 'from'} ${it.peer || 'somewhere'}${it.whole ? '' : ', its stream alone'}`);
    about.set('QEMU', it.qemu);
    about.set('Since', age(it.started_ms, it.started_ms + it.time_ns / 1e6));
    about.set('Round', it.course ? count(it.course.round) : NONE);
    about.set('Left', it.course ? `${bytes(it.course.remaining_bytes)} of ${bytes(it.course.total_bytes)}` : NONE);
    about.set('To go', isOver ? NONE : seconds(it.course?.expected_seconds ?? null));
    about.set('Stood still', milliseconds(it.downtime_ms));
    about.set('Limits', limitsText(it.limits));
    const done = it.sent || it.delivered;
    about.set('Sent', done ? `${bytes(done.raw_bytes)} in ${bytes(done.wire_bytes)}${ratio ? ` (${number(ratio)} times less)` : ''}` : NONE);
    const cpu = it.sent ? ['encoding', it.sent.encode_cpu_seconds] : ['decoding', it.delivered?.decode_cpu_seconds];
    about.set('CPU time', done ? `${seconds(done.cpu_seconds)}, of which ${cpu[0]} ${seconds(cpu[1])}` : NONE);
    tellWays(it.sent);
    tellEvidence(it.evidence);
    if (isOver || health !== 'up') {
      past.gap();
      before = null;
      return;
    }
    // A restarted migration cannot be compared with the one before.
    if (before && (before.started_ms !== it.started_ms || before.time_ns > it.time_ns)) before = null;
    if (past.add(migration.time_ms / 1000, sample(before, it, ratio), {})) before = it;
  }

  return {
    title: `Move of ${name} – Larder`,
    url: `/api/migration/${encodeURIComponent(key)}`,
    element,
    hears: { migration: hear },
    lost: past.gap,
    redraw: past.redraw,
    close: past.close,
  };
}

/** Creates links to migrations, each with its progress. `of` selects the label: `vm` for the VM and the peer, otherwise the peer alone. */
export function moveLinks(of) {
  const list = el('ul', { class: 'moves' });
  const links = new Map();
  show(list, false);
  return {
    element: list,
    set(moves) {
      show(list, moves.length > 0);
      const keys = new Set(moves.map(({ key }) => key));
      for (const [key, { item }] of links) {
        if (keys.has(key)) continue;
        item.remove();
        links.delete(key);
      }
      for (const move of moves) {
        if (!links.has(move.key)) {
          const link = el('a', { href: `#/migration/${encodeURIComponent(move.key)}` });
          const how = el('span');
          const item = el('li', { 'data-move': move.key }, link, ' ', how);
          links.set(move.key, { item, link, how });
          list.append(item);
        }
        const { item, link, how } = links.get(move.key);
        const way = `${move.direction === 'leaving' ? 'to' : 'from'} ${move.peer || 'somewhere'}`;
        const isOver = ['done', 'failed'].includes(move.phase);
        const rest = [
          move.words,
          !isOver && move.share !== null && `${percent(move.share)} over`,
          !isOver && move.stream_bytes_per_s !== null && bandwidth(move.stream_bytes_per_s),
          move.ratio !== null && `${number(move.ratio)} times less on the link`,
          !isOver && move.expected_seconds !== null && `${seconds(move.expected_seconds)} to go`,
          move.reason || (!isOver && move.verdict),
        ];
        text(link, of === 'vm' ? `${move.vm} ${way}` : way);
        text(how, rest.filter(Boolean).join(', '));
        item.classList.toggle('bad', move.phase === 'failed' || ['killed', 'stuck'].includes(move.health) || Boolean(!isOver && move.verdict));
      }
    },
  };
}
