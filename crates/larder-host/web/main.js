// Routing between the pages, and the event stream of the current page.

import { el, text } from './dom.js';
import { fleetPage } from './fleet.js';
import { migrationPage } from './migration.js';
import { vmPage } from './vm.js';

const page = document.getElementById('page');
const link = document.getElementById('link');
let current = null;

text(document.getElementById('host'), location.hostname);

function say(state, words) {
  link.dataset.state = state;
  text(link, words);
}

function route() {
  const [, kind, name] = /^#\/(vm|migration)\/(.+)$/.exec(location.hash) || [];
  const page = kind === 'migration' ? migrationPage : vmPage;
  try {
    return name ? page(decodeURIComponent(name)) : fleetPage();
  } catch {
    return fleetPage();
  }
}

/** Closes the current page, and opens the one that the URL names. */
function open() {
  if (location.hash === '#page' && current) return;
  current?.stream.close();
  current?.shown.close?.();
  const shown = route();
  document.title = shown.title;
  page.replaceChildren(shown.element);
  const stream = new EventSource(shown.url);
  say('waiting', 'connecting');
  stream.onerror = () => {
    say('lost', 'no connection');
    shown.lost?.();
    // The browser reconnects by itself, unless the response was not an event stream.
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => current?.stream === stream && reopen(), 3000);
  };
  for (const [name, hear] of Object.entries(shown.hears)) {
    stream.addEventListener(name, (event) => {
      say('live', 'live');
      hear(JSON.parse(event.data));
    });
  }
  current = { stream, shown };
}

/** Opens the page again, or the login form if the token has changed. */
async function reopen() {
  const answer = await fetch('/api/fleet', { method: 'HEAD' }).catch(() => undefined);
  if (answer?.status === 401) location.assign('/login');
  else open();
}

addEventListener('hashchange', () => {
  open();
  page.focus();
  scrollTo(0, 0);
});
document.addEventListener('larder-theme', () => current?.shown.redraw?.());
addEventListener('pagehide', () => current?.stream.close());
addEventListener('pageshow', (event) => event.persisted && open());
open();

if (!window.EventSource) page.append(el('p', { class: 'empty' }, 'This browser knows no server-sent events.'));
