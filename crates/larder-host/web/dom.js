// Creates elements without markup: texts come from VMs, and are never parsed as HTML.

/** Creates an element with attributes (a function is an event listener) and children: elements or texts. */
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

/** Sets the text of an element, if it differs. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** Shows or hides an element. */
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

/** Creates a badge that shows the health of a VM: a word with a mark. */
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
