// The newest steps and snapshots, and what follows from them.

const MAX_STEPS = 1500;
const WINDOW_S = 30; // of the tiles
const RATE_WINDOW_S = 5;
const SPARK_S = 60;

export class StepHistory {
  constructor() {
    this.clear();
  }

  /** Forget everything: another server may answer now. */
  clear() {
    this.steps = [];
    this.snapshots = []; // {atS, ...stats}
  }

  /** Take a "steps" message; a step after a gap is marked. */
  addSteps(message) {
    const [first] = message.steps;
    if (first !== undefined && this.steps.length > 0) first.numMissed = message.num_missed;
    this.steps.push(...message.steps);
    if (this.steps.length > MAX_STEPS * 1.2) this.steps.splice(0, this.steps.length - MAX_STEPS);
  }

  addStats(message) {
    this.snapshots.push({ atS: message.now_s, ...message.stats });
    while (this.snapshots[0].atS < message.now_s - SPARK_S - 1) this.snapshots.shift();
  }

  get newest() {
    return this.snapshots.at(-1);
  }

  /** How much counters grew in the last seconds, and in how many seconds; null before one passed. */
  growth(seconds, ...names) {
    const newest = this.newest;
    const oldest = this.snapshots.find((snapshot) => snapshot.atS >= newest.atS - seconds - 0.5);
    const span = newest.atS - oldest.atS;
    if (span <= 0) return null;
    const grown = Object.fromEntries(names.map((name) => [name, newest[name] - oldest[name]]));
    return { span, ...grown };
  }

  /** Tokens per second: {output, prompt}, or null. */
  rates() {
    const grown = this.growth(RATE_WINDOW_S, "generation_tokens", "prompt_tokens");
    if (grown === null) return null;
    return { output: grown.generation_tokens / grown.span, prompt: grown.prompt_tokens / grown.span };
  }

  /** {share, paddedShare}: of the slots computed; null without any. */
  waste() {
    const grown = this.growth(
      WINDOW_S,
      "padded_tokens",
      "wasted_prompt_slots",
      "wasted_row_slots",
      "iteration_tokens_sum",
    );
    if (grown === null) return null;
    const batch = grown.wasted_prompt_slots + grown.wasted_row_slots;
    const all = grown.padded_tokens + batch + grown.iteration_tokens_sum;
    if (all === 0) return null;
    return { share: (grown.padded_tokens + batch) / all, bucket: grown.padded_tokens / all, batch: batch / all };
  }

  /** {share, meanS}: mean absolute error of predicted step times; null without predictions. */
  predictionError() {
    const grown = this.growth(
      WINDOW_S,
      "num_predicted_steps",
      "step_prediction_error_s",
      "num_steps",
      "step_time_sum_s",
    );
    if (grown === null || grown.num_predicted_steps === 0 || grown.step_time_sum_s === 0) return null;
    const meanS = grown.step_prediction_error_s / grown.num_predicted_steps;
    return { meanS, share: meanS / (grown.step_time_sum_s / grown.num_steps) };
  }

  preemptions() {
    return this.growth(WINDOW_S, "num_preemptions")?.num_preemptions ?? 0;
  }

  /** Output rates between neighbouring snapshots, oldest first. */
  outputRates() {
    return this.snapshots.slice(1).map((snapshot, i) => {
      const before = this.snapshots[i];
      return (snapshot.generation_tokens - before.generation_tokens) / (snapshot.atS - before.atS);
    });
  }

  values(name) {
    return this.snapshots.map((snapshot) => snapshot[name]);
  }
}

/** Whether this part of a step is a token that leads to the next one, and not part of a prompt. */
export function isDecode(share) {
  return share.num_tokens === 1 && share.samples;
}
