// The chat page: a conversation, one answer at a time.

import { AnswerText, describe } from "./answer.js";
import { Connection } from "./connection.js";
import { socketUrl } from "./retrying_socket.js";
import { Settings } from "./settings.js";
import { StateLine } from "./state_line.js";

const $ = (id) => document.getElementById(id);
const scroller = $("scroller");
const log = $("log");
const input = $("input");

const settings = new Settings();
let history = []; // {role, content}: what the model is told about the conversation so far
let current = null; // the answer that streams now

const connection = new Connection(socketUrl("v1/stream"), showState);
const stateLine = new StateLine(() => connection.retryNow());

function showState(state) {
  stateLine.show(state, state.hello?.model);
  if (state.name === "open") input.placeholder = `Message ${state.hello.model}`;
  showButtons();
}

function showButtons() {
  $("send").disabled = input.value.trim() === "" || !connection.isOpen;
  $("send").hidden = current !== null;
  $("stop").hidden = current === null;
  $("new-chat").disabled = log.childElementCount === 0;
  $("welcome").hidden = log.childElementCount > 0;
}

// ---- the conversation ----

function ask(question) {
  if (current !== null || !connection.isOpen) return;
  addTurn("user").append(question);
  history.push({ role: "user", content: question });
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const request = { messages: [...system, ...history], ...settings.options() };
  current = new Answer(request);
  showButtons();
  scrollToEnd();
}

class Answer {
  constructor(request) {
    const element = addTurn("assistant");
    this.turn = element.parentElement;
    this.turn.classList.add("streaming");
    this.text = new AnswerText(element);
    this.text.open(document.createElement("div"), "prose");
    this.meta = document.createElement("div");
    this.meta.className = "meta";
    this.turn.append(this.meta);
    this.unshown = "";
    this.frame = 0;
    this.numTokens = 0;
    this.firstMs = 0;
    log.setAttribute("aria-busy", "true"); // read out when it is complete, not word by word
    this.id = connection.start(request, {
      delta: (message) => this.take(message),
      done: (message) => this.end(describe(message)),
      failed: (text) => this.fail(text),
      interrupted: (isInterrupted) => this.turn.classList.toggle("interrupted", isInterrupted),
    });
  }

  take(message) {
    if (this !== current) return; // a new chat has begun
    if (this.numTokens === 0) this.firstMs = performance.now();
    this.numTokens += message.token_ids?.length ?? 0;
    this.unshown += message.text;
    // Many deltas may come between two frames; the page is touched once for all of them.
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const atEnd = isAtEnd();
    this.text.push(this.unshown);
    this.unshown = "";
    const seconds = (performance.now() - this.firstMs) / 1000;
    const parts = [`${this.numTokens} tokens`];
    if (seconds > 0.3) parts.push(`${((this.numTokens - 1) / seconds).toFixed(1)} tokens/s`);
    this.showNumbers(parts);
    if (atEnd) scrollToEnd();
  }

  showNumbers(parts) {
    this.meta.replaceChildren(
      ...parts.map((part) => {
        const span = document.createElement("span");
        span.append(part);
        return span;
      }),
    );
  }

  end(parts) {
    if (this !== current) return;
    const atEnd = isAtEnd();
    this.show();
    this.text.finish();
    this.turn.classList.remove("streaming", "interrupted");
    if (this.text.whole !== "") {
      history.push({ role: "assistant", content: this.text.whole });
      this.showNumbers(parts);
      this.meta.append(copyButton(this.text.whole));
    } else {
      history.pop(); // a question without an answer would confuse the next one
      this.showNumbers(["no answer", ...parts]);
    }
    current = null;
    log.removeAttribute("aria-busy");
    $("announcer").textContent = `Answer complete, ${parts[0]}.`;
    showButtons();
    if (atEnd) scrollToEnd();
  }

  fail(text) {
    if (this !== current) return;
    this.end([`${this.numTokens} tokens`, "broken off"]);
    const problem = document.createElement("p");
    problem.className = "problem";
    problem.setAttribute("role", "alert");
    problem.append(text);
    this.turn.append(problem);
    scrollToEnd();
  }
}

function addTurn(role) {
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  turn.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const text = document.createElement("div");
  text.className = "text";
  turn.append(text);
  log.append(turn);
  return text;
}

function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.append("Copy");
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copying is not allowed here";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return button;
}

function isAtEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
}

function scrollToEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

// ---- what the user does ----

function submit() {
  const question = input.value.trim();
  if (question === "" || current !== null || !connection.isOpen) return;
  input.value = "";
  fitInput();
  ask(question);
}

function fitInput() {
  input.rows = Math.min(7, input.value.split("\n").length);
  showButtons();
}

function stop() {
  if (current !== null) connection.cancel(current.id);
  input.focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});

input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !settings.dialog.open) stop();
});

$("stop").onclick = stop;

$("new-chat").onclick = () => {
  if (current !== null) connection.cancel(current.id);
  current = null;
  history = [];
  log.replaceChildren();
  log.removeAttribute("aria-busy");
  showButtons();
  input.focus();
};

for (const idea of $("ideas").querySelectorAll("button")) {
  idea.onclick = () => {
    ask(idea.textContent);
    input.focus();
  };
}

connection.connect();
