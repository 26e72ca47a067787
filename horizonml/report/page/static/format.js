// Writes numbers for people.

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(1);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) < 5e-8) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  if (value < 120) return `${number(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${number(value / 3600)} h`;
  return `${number(value / 86400)} d`;
}

export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value, 2)} ${units[unit]}`;
}

export const memory = (value) => (value > 0 ? `${number(value / 2 ** 30, 2)} GiB` : "–");
export const rate = (value) => (value === null || value === undefined ? "–" : `${bytes(value)}/s`);
export const megabits = (value) => (value > 0 ? `${number((8 * value) / 1e6, 2)} Mbit/s` : "–");
export const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 3)}%`);
export const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
export const plural = (count, thing) => `${number(count)} ${thing}${count === 1 ? "" : "s"}`;
