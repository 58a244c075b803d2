// The composition of every step: one bar each, tokens above and time below, the newest on the right.

const PITCH = 6; // of a bar, in CSS pixels
const BAR = 5;
const LEFT = 46; // room for the scale
const RIGHT = 6;
const TOP = 16;
const BETWEEN = 30; // the strips
const BOTTOM = 20;
const TOKENS_PART = 0.66; // of the height that both strips share
const SETTLE_MS = 90; // how fast bars that are new push the others to the left
const STEPS_KEYS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };

export class StepChart {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Object} handlers
   * @param {(step: Object|null) => void} handlers.point  the step under the mouse, or none
   * @param {(step: Object|null) => void} handlers.pick  the step to keep in view, or none
   */
  constructor(canvas, handlers) {
    this.canvas = canvas;
    this.handlers = handlers;
    this.steps = [];
    this.asShare = false;
    this.pointed = null;
    this.picked = null;
    this.lag = 0; // steps that the picture is behind while it scrolls
    this.frame = 0;
    this.drawnAtMs = 0;
    this.lessMotion = matchMedia("(prefers-reduced-motion: reduce)");
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.readColours());
    this.readColours();
    new ResizeObserver(() => this.redraw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.onPointer(event));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("click", (event) => this.onClick(event));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Show these steps, oldest first. */
  show(steps) {
    const before = this.steps.at(-1)?.index;
    const numNew = before === undefined ? 0 : steps.length - 1 - findIndex(steps, before);
    const jumps = this.lessMotion.matches || numNew < 0 || numNew >= this.numVisible;
    this.lag = jumps ? 0 : this.lag + numNew;
    this.steps = steps;
    this.redraw();
  }

  showShares(asShare) {
    this.asShare = asShare;
    this.redraw();
  }

  redraw() {
    if (this.frame === 0) this.frame = requestAnimationFrame((nowMs) => this.draw(nowMs));
  }

  // ---- which step ----

  get right() {
    return this.canvas.clientWidth - RIGHT;
  }

  get numVisible() {
    return Math.max(1, Math.floor((this.right - LEFT) / PITCH));
  }

  stepAt(x) {
    if (x < LEFT) return null;
    const fromRight = Math.floor((this.right - x) / PITCH + this.lag);
    return this.steps[this.steps.length - 1 - Math.max(0, fromRight)] ?? null;
  }

  onPointer(event) {
    if (event.pointerType !== "touch") this.point(this.stepAt(event.offsetX));
  }

  onClick(event) {
    const step = this.stepAt(event.offsetX);
    this.pick(step?.index === this.picked?.index ? null : step);
  }

  onKey(event) {
    const last = this.steps.length - 1;
    const first = Math.max(0, last - this.numVisible + 1);
    const current = this.picked === null ? last + 1 : findIndex(this.steps, this.picked.index);
    let target;
    if (event.key in STEPS_KEYS) target = current + STEPS_KEYS[event.key];
    else if (event.key === "Home") target = first;
    else if (event.key === "End") target = last;
    else if (event.key !== "Escape") return;
    event.preventDefault();
    this.pick(target === undefined ? null : (this.steps[clamp(target, first, last)] ?? null));
  }

  point(step) {
    if (step?.index === this.pointed?.index) return;
    this.pointed = step;
    this.handlers.point(step);
    this.redraw();
  }

  pick(step) {
    this.picked = step;
    this.handlers.pick(step);
    this.redraw();
  }

  // ---- drawing ----

  readColours() {
    const style = getComputedStyle(this.canvas);
    const names = ["decode", "prefill", "wasted", "time", "predicted", "bad", "grid", "muted", "text", "sunken"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.font = `11px ${style.fontFamily}`;
    this.redraw();
  }

  draw(nowMs) {
    this.frame = 0;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const ratio = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = this.font;

    const strips = height - TOP - BETWEEN - BOTTOM;
    const tokens = { top: TOP, bottom: TOP + Math.round(strips * TOKENS_PART) };
    const time = { top: tokens.bottom + BETWEEN, bottom: height - BOTTOM };
    const visible = this.steps.slice(-(this.numVisible + Math.ceil(this.lag) + 1));
    tokens.max = this.asShare ? 1 : Math.max(8, ...visible.map((step) => step.num_slots));
    time.max = niceCeiling(Math.max(0.001, usualMost(visible)));

    this.drawScale(pen, tokens, this.asShare ? "share of the bucket" : "token slots", (v) =>
      this.asShare ? `${Math.round(v * 100)} %` : `${Math.round(v)}`,
    );
    this.drawScale(pen, time, "milliseconds on the device", (v) => `${Number((v * 1000).toPrecision(3))}`);

    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.right - LEFT, height);
    pen.clip();
    visible.forEach((step, i) => {
      const x = this.right - (visible.length - i - this.lag) * PITCH;
      if (x + BAR <= LEFT) return;
      this.drawStep(pen, step, x, tokens, time);
      if (step.index % 50 === 0) this.drawIndex(pen, step.index, x, height);
    });
    pen.restore();
    this.settle(nowMs);
  }

  drawStep(pen, step, x, tokens, time) {
    const colours = this.colours;
    if (step.index === this.pointed?.index || step.index === this.picked?.index) {
      pen.fillStyle = colours.text;
      pen.globalAlpha = 0.13;
      pen.fillRect(x - 0.5, tokens.top - 10, PITCH, time.bottom - tokens.top + 10);
      pen.globalAlpha = 1;
    }
    const scale = (tokens.bottom - tokens.top) / (this.asShare ? Math.max(1, step.num_slots) : tokens.max);
    let y = tokens.bottom;
    let total = 0;
    for (const [name, count] of [
      ["decode", step.decode_tokens],
      ["prefill", step.prefill_tokens],
      ["wasted", step.wasted_slots],
    ]) {
      if (count === 0) continue;
      total += count;
      const top = Math.min(y - 1, Math.round(tokens.bottom - total * scale)); // whole pixels are crisp
      const height = y - top;
      y = top;
      pen.fillStyle = colours[name];
      if (name === "wasted") {
        // Hollow, so that it also differs without colours.
        pen.globalAlpha = 0.25;
        pen.fillRect(x, y, BAR, height);
        pen.globalAlpha = 1;
        pen.fillRect(x, y, BAR, 1);
        pen.fillRect(x, y, 1, height);
        pen.fillRect(x + BAR - 1, y, 1, height);
      } else {
        pen.fillRect(x, y, BAR, height);
      }
    }
    if (step.num_preempted > 0) {
      pen.fillStyle = colours.bad;
      pen.beginPath();
      pen.moveTo(x - 1.5, y - 9);
      pen.lineTo(x + BAR + 1.5, y - 9);
      pen.lineTo(x + BAR / 2, y - 2);
      pen.fill();
    }
    const timeScale = (time.bottom - time.top) / time.max;
    const height = Math.max(1, Math.round(Math.min(step.duration_s, time.max) * timeScale));
    pen.fillStyle = colours.time;
    pen.fillRect(x, time.bottom - height, BAR, height);
    if (step.duration_s > time.max) {
      pen.fillStyle = colours.bad;
      pen.fillRect(x, time.top - 3, BAR, 3);
    }
    if (step.predicted_s !== null && step.predicted_s <= time.max) {
      pen.fillStyle = colours.predicted;
      pen.fillRect(x - 0.5, time.bottom - Math.round(step.predicted_s * timeScale) - 1, PITCH, 2);
    }
    if (step.numMissed > 0) {
      pen.strokeStyle = colours.bad;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(x - 0.5, tokens.top);
      pen.lineTo(x - 0.5, time.bottom);
      pen.stroke();
      pen.setLineDash([]);
    }
  }

  drawScale(pen, strip, title, format) {
    pen.fillStyle = this.colours.muted;
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    pen.fillText(title, LEFT, strip.top - 5);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      const y = Math.round(strip.bottom - (strip.bottom - strip.top) * part) + 0.5;
      pen.fillStyle = this.colours.grid;
      pen.fillRect(LEFT, y - 0.5, this.right - LEFT, 1);
      pen.fillStyle = this.colours.muted;
      pen.fillText(format(strip.max * part), LEFT - 7, y);
    }
  }

  drawIndex(pen, index, x, height) {
    pen.fillStyle = this.colours.muted;
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    pen.fillText(`#${index}`, x + BAR / 2, height - 5);
  }

  settle(nowMs) {
    const passedMs = Math.min(50, nowMs - this.drawnAtMs);
    this.drawnAtMs = nowMs;
    if (this.lag === 0) return;
    this.lag = this.lag < 0.05 ? 0 : this.lag * Math.exp(-passedMs / SETTLE_MS);
    this.redraw();
  }
}

/** Place of the step in an array that is sorted by index, -1 if it is not there. */
function findIndex(steps, index) {
  const place = index - (steps[0]?.index ?? 0);
  if (steps[place]?.index === index) return place;
  return steps.findIndex((step) => step.index === index);
}

/** What the scale of times has to hold: the longest one, but no outlier that would flatten the rest. */
function usualMost(steps) {
  if (steps.length === 0) return 0;
  const times = steps.map((step) => Math.max(step.duration_s, step.predicted_s ?? 0)).sort((a, b) => a - b);
  return Math.min(times.at(-1), 2.5 * times[Math.floor(0.9 * (times.length - 1))]);
}

/** The smallest round number that is not smaller. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 6, 8, 10].find((step) => step * power >= value * 0.999);
}

function clamp(value, least, most) {
  return Math.min(most, Math.max(least, value));
}
