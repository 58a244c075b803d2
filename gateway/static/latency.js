// Percentiles of what requests experienced lately, from the histograms of /metrics.

const WINDOW_MS = 30_000;
const NAMES = { ttft: "time_to_first_token_seconds", itl: "inter_token_latency_seconds" };

export class LatencyWindow {
  constructor() {
    this.clear();
  }

  clear() {
    this.snapshots = []; // {atMs, ttft: buckets, itl: buckets}
  }

  /** Take the text of /metrics as of this moment. */
  take(text, atMs) {
    const snapshot = { atMs };
    for (const [key, name] of Object.entries(NAMES)) snapshot[key] = parseBuckets(text, `headrace_${name}`);
    this.snapshots.push(snapshot);
    // One that is older than the window stays, to compare with.
    while (this.snapshots.length > 2 && this.snapshots[1].atMs <= atMs - WINDOW_MS) this.snapshots.shift();
  }

  /**
   * Return {count, quantile(q)} of the observations within the window.
   * @param {"ttft"|"itl"} key
   */
  latest(key) {
    const oldest = this.snapshots[0]?.[key] ?? [];
    const newest = this.snapshots.at(-1)?.[key] ?? [];
    const buckets = newest.map(([bound, count], i) => [bound, count - (oldest[i]?.[1] ?? 0)]);
    const count = buckets.at(-1)?.[1] ?? 0;
    return { count, quantile: (q) => quantile(buckets, q) };
  }
}

/** Return [[upper bound, cumulative count], ...] of one histogram in Prometheus' text format. */
export function parseBuckets(text, name) {
  const counts = new Map();
  const prefix = `${name}_bucket{`;
  for (const line of text.split("\n")) {
    if (!line.startsWith(prefix)) continue;
    const bound = /[{,]le="([^"]+)"/.exec(line)[1];
    const upper = bound === "+Inf" ? Infinity : Number(bound);
    const count = Number(line.slice(line.lastIndexOf("}") + 1).trim().split(" ")[0]);
    counts.set(upper, (counts.get(upper) ?? 0) + count);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

/** As Prometheus does it: within a bucket, observations are taken to be spread evenly. */
export function quantile(buckets, q) {
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = q * total;
  let lower = 0;
  let below = 0;
  for (const [upper, count] of buckets) {
    if (count >= rank && count > below) {
      if (upper === Infinity) return lower;
      return lower + ((upper - lower) * (rank - below)) / (count - below);
    }
    lower = upper;
    below = count;
  }
  return lower;
}
