// Formats numbers for people.

const BINARY = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];

const places = (value) => (value >= 99.95 || value === 0 ? 0 : value >= 9.995 ? 1 : 2);

export const NONE = '–';

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let unit = 0;
  let rest = value;
  while (Math.abs(rest) >= 1023.5 && unit < BINARY.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(rest) : rest.toFixed(places(Math.abs(rest)))} ${BINARY[unit]}`;
}

export const bandwidth = (value) => (value === null || value === undefined ? NONE : `${bytes(value)}/s`);

export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 999_500) return `${(value / 1e6).toFixed(places(value / 1e6))} M`;
  if (value >= 9_995) return `${(value / 1e3).toFixed(places(value / 1e3))} k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  const [scaled, unit] = value < 1e-6 ? [value * 1e9, 'ns'] : value < 1e-3 ? [value * 1e6, 'µs'] : value < 1 ? [value * 1e3, 'ms'] : [value, 's'];
  return `${scaled.toFixed(places(scaled))} ${unit}`;
}

export const percent = (value) => (value === null || value === undefined ? NONE : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`);

/** Formats an age roughly. */
export function age(since, now) {
  const all = Math.max(0, Math.round((now - since) / 1000));
  const parts = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const [size, unit] = parts.find(([size]) => all >= size) || [1, 's'];
  return `${Math.floor(all / size)} ${unit}`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });
