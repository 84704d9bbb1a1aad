// Light, dark, or as the system is. Not a module: it runs before anything is drawn.
'use strict';

(() => {
  const root = document.documentElement;
  const names = ['system', 'light', 'dark'];
  let now = 'system';
  try {
    now = localStorage.getItem('larder-theme') || now;
  } catch {
    // A browser that stores nothing has the system's.
  }
  const show = () => {
    if (now === 'system') delete root.dataset.theme;
    else root.dataset.theme = now;
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
        // As above.
      }
      show();
    });
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', show);
})();
