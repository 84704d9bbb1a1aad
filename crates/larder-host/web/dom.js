// Elements, made without markup: texts come from VMs, and are never read as HTML.

/** An element with attributes (a function listens), and children: elements, or texts. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function') element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets a text, if it is another one. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** Shows or hides. */
export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}

const WORDS = {
  up: 'up',
  new: 'asking',
  stuck: 'stuck',
  killed: 'killed',
  stopped: 'stopped',
  denied: 'no permission',
  foreign: 'not Larder',
};

/** How a VM is, as a word with a mark. */
export function badge() {
  const element = el('span', { class: 'badge' });
  return {
    element,
    set(health, why) {
      element.dataset.health = health;
      text(element, WORDS[health] || health);
      element.title = why || '';
    },
  };
}
