// The dashboard: what the engine does now, from the feed of its steps and from /metrics.

import { LatencyWindow } from "./latency.js";
import { RetryingSocket, socketUrl } from "./retrying_socket.js";
import { StateLine } from "./state_line.js";
import { StepChart } from "./step_chart.js";
import { StepDetails, describeStep } from "./step_details.js";
import { StepHistory } from "./step_history.js";
import { showLatencies, showTiles } from "./tiles.js";

const LATENCY_INTERVAL_MS = 2000;
const NEWEST_INTERVAL_MS = 400; // the details of the newest step change no faster
const SILENCE_INTERVALS = 5; // of the feed, after which the connection counts as lost

const $ = (id) => document.getElementById(id);

const history = new StepHistory();
const latency = new LatencyWindow();
const details = new StepDetails();
const chart = new StepChart($("chart"), { point, pick });

let paused = false;
let frozen = null; // the steps on show while nothing should move
let pointed = null;
let picked = null;
let newestTimer = 0;

// ---- the feed ----

const NAMES_OF_STATUS = { ready: "", not_ready: "not ready", stalled: "the engine hangs", dead: "the engine is dead" };

let model = "";
let status = "ready";
let silenceTimer = 0;
let silenceMs = 10_000;

// From the first kept step on: the newest of them come at once.
const handlers = {
  message: receive,
  lost: () => clearTimeout(silenceTimer),
  state: (state) => stateLine.show(state),
};
const feed = socketUrl("v1/steps/stream?after=-1&shares=1");
const socket = new RetryingSocket(feed, [], handlers, "v1/steps?limit=1");
const stateLine = new StateLine(() => socket.retryNow());

function receive(message) {
  clearTimeout(silenceTimer);
  silenceTimer = setTimeout(() => socket.drop(), silenceMs);
  switch (message.type) {
    case "hello":
      socket.succeeded();
      history.clear(); // it may be another server, whose steps count from 0
      latency.clear();
      model = message.model;
      silenceMs = message.stats_interval_s * SILENCE_INTERVALS * 1000;
      showState();
      pollLatency();
      break;
    case "stats":
      history.addStats(message);
      if (message.status !== status) {
        status = message.status;
        showState();
      }
      if (!paused) showTiles(history);
      break;
    case "steps":
      history.addSteps(message);
      showSteps();
      break;
    case "goaway":
      socket.stayAway(message.retry_after_s);
      break;
  }
}

function showState() {
  const parts = [model, NAMES_OF_STATUS[status], paused ? "paused" : ""];
  stateLine.show({ name: "open" }, parts.filter(Boolean).join(" · "));
}

async function pollLatency() {
  if (paused || document.hidden || $("state").dataset.state !== "open") return;
  try {
    const response = await socket.signIn.request("metrics", "GET");
    if (response.ok) latency.take(await response.text(), performance.now());
  } catch {
    return; // the socket finds out what is wrong
  }
  showLatencies(latency);
}

// ---- what is shown ----

function showSteps() {
  if (frozen !== null) return;
  chart.show(history.steps);
  $("empty").hidden = history.steps.length > 0;
  showDetails();
}

function showDetails() {
  const step = pointed ?? picked;
  if (step !== null) {
    details.show(step, pointed !== null ? "under the pointer" : "selected");
  } else if (newestTimer === 0) {
    const newest = (frozen ?? history.steps).at(-1);
    if (newest !== undefined) details.show(newest, "the newest");
    newestTimer = setTimeout(() => {
      newestTimer = 0;
      showDetails();
    }, NEWEST_INTERVAL_MS);
  }
}

/** Stop or go on: nothing moves while paused, nor under the pointer. */
function freeze() {
  const wasFrozen = frozen !== null;
  const isFrozen = paused || pointed !== null;
  $("held").hidden = pointed === null || paused;
  if (isFrozen && !wasFrozen) frozen = [...history.steps];
  if (!isFrozen && wasFrozen) {
    frozen = null;
    showSteps();
  }
}

function point(step) {
  pointed = step;
  freeze();
  showDetails();
}

function pick(step) {
  picked = step;
  const canvas = $("chart");
  const shown = frozen ?? history.steps;
  canvas.setAttribute("aria-valuemin", shown[0]?.index ?? 0);
  canvas.setAttribute("aria-valuemax", shown.at(-1)?.index ?? 0);
  canvas.setAttribute("aria-valuenow", step?.index ?? shown.at(-1)?.index ?? 0);
  canvas.setAttribute("aria-valuetext", step === null ? "No step is selected" : describeStep(step));
  showDetails();
}

// ---- what the user does ----

$("pause").onclick = () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").title = $("pause-text").textContent = paused ? "Resume" : "Pause";
  freeze();
  if ($("state").dataset.state === "open") showState();
  if (!paused && history.newest !== undefined) showTiles(history);
};

for (const radio of document.querySelectorAll("input[name=scale]")) {
  radio.onchange = () => chart.showShares(radio.value === "share");
}

setInterval(pollLatency, LATENCY_INTERVAL_MS);
socket.connect();
