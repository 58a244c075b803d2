// One step in words: what it was made of, how long it took, and who was in it.

import { formatMilliseconds, formatNumber, formatShare, plural } from "./format.js";
import { isDecode } from "./step_history.js";

const $ = (id) => document.getElementById(id);

const WAITING_FOR = {
  seqs: "a free row",
  kv_cache: "KV blocks",
  tokens: "room in a step",
  batch: "the batch to end",
  preemption: "preempted requests to resume",
};

/** "3 wait for KV blocks" */
export function describeWaiting(numWaiting, waitingFor) {
  if (numWaiting === 0) return "none waits";
  const reason = WAITING_FOR[waitingFor] ?? waitingFor;
  return `${formatNumber(numWaiting)} ${numWaiting === 1 ? "waits" : "wait"}${reason ? ` for ${reason}` : ""}`;
}

/** One line for those who cannot see the chart. */
export function describeStep(step) {
  const parts = [
    `Step ${step.index}`,
    `${plural(step.decode_tokens, "decode token")}, ${plural(step.prefill_tokens, "prefill token")}`,
    `${step.wasted_slots} of ${plural(step.num_slots, "slot")} wasted`,
    `took ${formatMilliseconds(step.duration_s)} milliseconds`,
  ];
  if (step.predicted_s !== null) parts.push(`predicted ${formatMilliseconds(step.predicted_s)}`);
  if (step.num_preempted > 0) parts.push(plural(step.num_preempted, "preemption"));
  return `${parts.join("; ")}.`;
}

export class StepDetails {
  constructor() {
    this.shown = null;
  }

  /** @param {string} tag  why this step is shown */
  show(step, tag) {
    $("details-tag").textContent = tag;
    if (step === this.shown) return;
    this.shown = step;
    $("details-title").textContent = `Step ${step.index}`;
    const facts = [
      ["Decode", `${plural(step.decode_tokens, "token")} of ${plural(step.num_decodes, "request")}`],
      ["Prefill", `${plural(step.prefill_tokens, "token")} of ${plural(step.num_prefills, "request")}`],
      ["Bucket", `${plural(step.num_slots, "slot")}, ${step.wasted_slots} wasted (${formatShare(step.wasted_slots / Math.max(1, step.num_slots))})`],
      ["On the device", `${formatMilliseconds(step.duration_s)} ms`],
      predicted(step),
      ["Scheduling", `${formatMilliseconds(step.launched_after_s)} ms`],
      ["Device queue", `${formatMilliseconds(step.device_start_after_s - step.launched_after_s)} ms`],
      ["Running", plural(step.num_running, "request")],
      ["Waiting", describeWaiting(step.num_waiting, step.waiting_for)],
      ["KV blocks", `${step.num_used_blocks} used, ${step.num_cached_blocks} cached, ${step.num_free_blocks} free`],
    ];
    if (step.overtaken_s > 0) facts.push(["Overtaken", `for ${formatMilliseconds(step.overtaken_s)} ms`]);
    if (step.num_preempted > 0) facts.push(["Preempted", plural(step.num_preempted, "request"), "late"]);
    if (step.numMissed > 0) facts.push(["Before it", `${plural(step.numMissed, "step")} not shown`, "late"]);
    $("facts").replaceChildren(...facts.flatMap(fact));
    const shares = step.shares ?? [];
    $("shares-title").textContent = `Who was in it (${shares.length})`;
    $("shares").replaceChildren(...shares.map(shareRow));
  }
}

function predicted(step) {
  if (step.predicted_s === null) return ["Predicted", "no prediction"];
  const error = step.duration_s / step.predicted_s - 1;
  const difference = `${formatShare(Math.abs(error))} ${error < 0 ? "less" : "more"}`;
  const text = `${formatMilliseconds(step.predicted_s)} ms; took ${difference}`;
  return ["Predicted", text, error > 0.25 ? "late" : ""];
}

function fact([name, value, className = ""]) {
  const dt = document.createElement("dt");
  const dd = document.createElement("dd");
  dt.append(name);
  dd.append(value);
  if (className) dd.className = className;
  return [dt, dd];
}

function shareRow(share) {
  const row = document.createElement("tr");
  const [id, part, positions] = ["td", "td", "td"].map((name) => document.createElement(name));
  id.append(share.request_id);
  id.title = share.request_id;
  const kind = isDecode(share) ? "decode" : "prefill";
  const key = document.createElement("span");
  key.className = `key ${kind}`;
  part.append(key, kind === "decode" ? kind : `${kind} ${share.num_tokens}`);
  positions.className = "number";
  const last = share.first_position + share.num_tokens - 1;
  positions.append(last === share.first_position ? `${last}` : `${share.first_position}–${last}`);
  row.append(id, part, positions);
  return row;
}
