// Numbers as people read them.

/** Seconds in the unit that suits them: "0.42 ms", "12 ms", "1.3 s". */
export function formatSeconds(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${formatMilliseconds(seconds)} ms`;
}

export function formatMilliseconds(seconds) {
  const ms = seconds * 1000;
  return ms.toFixed(ms < 1 ? 2 : ms < 10 ? 1 : 0);
}

/** "0", "0.4 %", "12 %": a share between 0 and 1. */
export function formatShare(share) {
  const percent = share * 100;
  if (percent === 0) return "0 %";
  return `${percent.toFixed(percent < 9.95 ? 1 : 0)} %`;
}

/** "7.3", "1,204": a rate or a count. */
export function formatNumber(value) {
  if (!Number.isInteger(value) && value < 100) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

export function plural(count, one, many = `${one}s`) {
  return `${formatNumber(count)} ${count === 1 ? one : many}`;
}
