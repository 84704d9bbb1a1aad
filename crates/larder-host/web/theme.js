// Theme: light, dark, or as the system. This script is not a module, so it runs before anything is drawn.
'use strict';

(() => {
  const root = document.documentElement;
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const names = ['system', 'light', 'dark'];
  let now = 'system';
  try {
    now = localStorage.getItem('larder-theme') || now;
  } catch {
    // Without local storage the theme is the system's.
  }
  const show = () => {
    const system = dark.matches ? 'dark' : 'light';
    root.dataset.theme = now === 'system' ? system : now;
    const button = document.getElementById('theme');
    if (button) button.textContent = `Theme: ${now}`;
    document.dispatchEvent(new Event('larder-theme'));
  };
  show();
  addEventListener('DOMContentLoaded', () => {
    show();
    document.getElementById('theme')?.addEventListener('click', () => {
      now = names[(names.indexOf(now) + 1) % names.length];
      try {
        localStorage.setItem('larder-theme', now);
      } catch {
        // Without local storage the choice lasts until the page is closed.
      }
      show();
    });
  });
  dark.addEventListener('change', show);
})();
