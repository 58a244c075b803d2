// The numbers on top.

import { formatNumber, formatSeconds, formatShare, plural } from "./format.js";
import { describeWaiting } from "./step_details.js";

const $ = (id) => document.getElementById(id);

export function showLatencies(latency) {
  showLatency("ttft", latency.latest("ttft"), (count) => plural(count, "request"), "no request in the last 30 s");
  showLatency("itl", latency.latest("itl"), (count) => plural(count, "token"), "no tokens in the last 30 s");
}

function showLatency(id, { count, quantile }, countText, noneText) {
  $(`${id}-p50`).textContent = count === 0 ? "–" : formatSeconds(quantile(0.5));
  $(`${id}-more`).textContent =
    count === 0 ? noneText : `p99 ${formatSeconds(quantile(0.99))} · ${countText(count)} in 30 s`;
}

/** @param {import("./step_history.js").StepHistory} history  with at least one snapshot */
export function showTiles(history) {
  const now = history.newest;
  const rates = history.rates();
  $("output-rate").textContent = rates === null ? "–" : formatNumber(rates.output);
  $("prompt-rate").textContent = rates === null ? "" : `prompts ${formatNumber(rates.prompt)} tokens/s`;
  const outputs = history.outputRates();
  drawLine($("output-spark"), outputs, Math.max(1, ...outputs));

  $("running").textContent = formatNumber(now.num_running);
  $("waiting").textContent = describeWaiting(now.num_waiting, now.waiting_for);
  const [running, waiting] = [history.values("num_running"), history.values("num_waiting")];
  const most = Math.max(1, ...running, ...waiting);
  drawLine($("running-spark"), running, most);
  drawLine($("waiting-spark"), waiting, most);

  const blocks = Math.max(1, now.num_blocks);
  const empty = now.num_free_blocks - now.num_cached_blocks;
  $("kv-used").textContent = formatShare(now.kv_cache_usage);
  $("kv-more").textContent =
    `${formatNumber(now.num_blocks - now.num_free_blocks)} used · ` +
    `${formatNumber(now.num_cached_blocks)} cached · ${formatNumber(empty)} free blocks`;
  $("kv-used-bar").style.width = `${now.kv_cache_usage * 100}%`;
  $("kv-cached-bar").style.width = `${(now.num_cached_blocks / blocks) * 100}%`;

  $("preemptions").textContent = formatNumber(history.preemptions());
  $("preemptions-more").textContent = `${formatNumber(now.num_preemptions)} since the start`;

  const error = history.predictionError();
  $("prediction").textContent = error === null ? "–" : formatShare(error.share);
  $("prediction-more").textContent =
    error === null ? "nothing predicted in the last 30 s" : `${formatSeconds(error.meanS)} off on average in 30 s`;

  const waste = history.waste();
  $("wasted").textContent = waste === null ? "–" : formatShare(waste.share);
  $("wasted-more").textContent =
    waste === null
      ? "no steps in the last 30 s"
      : `${formatShare(waste.bucket)} to fill buckets, ${formatShare(waste.batch)} in batches`;
}

/** Draw values of the last 60 seconds, the newest at the right edge of a 60 by 20 box. */
function drawLine(polyline, values, most) {
  const points = values
    .slice(-61)
    .reverse()
    .map((value, age) => `${60 - age},${(19 - (18 * value) / most).toFixed(2)}`);
  polyline.setAttribute("points", points.join(" "));
}
