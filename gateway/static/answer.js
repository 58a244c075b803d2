// One answer on the page. Everything the model says becomes text nodes; nothing is parsed as HTML.

import { formatSeconds } from "./format.js";

/** Write text into an element as it comes; ``` fences become code blocks. */
export class AnswerText {
  constructor(element) {
    this.element = element;
    this.whole = "";
    this.waiting = ""; // the start of a line that may yet turn out to be a fence
    this.atLineStart = true;
    this.block = null; // where text goes: the last prose or code element
    this.inCode = false;
  }

  push(text) {
    if (this.whole === "") text = text.trimStart();
    this.whole += text;
    this.waiting += text;
    while (this.waiting !== "") {
      if (this.atLineStart) {
        const line = this.waiting.split("\n", 1)[0];
        const isWhole = line.length < this.waiting.length;
        const trimmed = line.trimStart();
        if (trimmed.startsWith("```")) {
          if (!isWhole) return; // the name of the language is still coming
          this.toggleCode(trimmed.slice(3).trim());
          this.waiting = this.waiting.slice(line.length + 1);
          continue;
        }
        if (!isWhole && "```".startsWith(trimmed)) return;
        this.atLineStart = false;
      }
      const end = this.waiting.indexOf("\n") + 1;
      const piece = end === 0 ? this.waiting : this.waiting.slice(0, end);
      this.append(piece);
      this.atLineStart = end !== 0;
      this.waiting = this.waiting.slice(piece.length);
    }
  }

  /** Show what was held back; no more text comes. */
  finish() {
    const rest = this.waiting;
    this.waiting = "";
    if (rest !== "" && !(this.inCode && rest.trim() === "```")) this.append(rest);
    for (const block of this.element.querySelectorAll(".caret")) block.classList.remove("caret");
  }

  append(text) {
    if (this.block === null) {
      if (text.trim() === "") return; // blank lines around code
      this.open(document.createElement("div"), "prose");
    }
    // One text node per block, so that selecting and copying stay simple.
    this.block.firstChild.appendData(text);
  }

  toggleCode(language) {
    this.inCode = !this.inCode;
    if (this.block !== null) this.block.firstChild.data = this.block.textContent.trimEnd();
    this.block = null;
    if (!this.inCode) return;
    const frame = document.createElement("div");
    frame.className = "code";
    if (language) {
      const head = document.createElement("div");
      head.className = "code-head";
      head.append(language);
      frame.append(head);
    }
    const pre = document.createElement("pre");
    pre.tabIndex = 0; // so that a wide block can be scrolled by keyboard
    frame.append(pre);
    this.element.append(frame);
    this.open(document.createElement("code"), "", pre);
  }

  open(block, className, parent = this.element) {
    for (const old of this.element.querySelectorAll(".caret")) old.classList.remove("caret");
    if (className) block.className = className;
    block.classList.add("caret");
    block.append(document.createTextNode(""));
    parent.append(block);
    this.block = block;
  }
}

/** Return the numbers of a finished answer as short pieces of text. */
export function describe(done) {
  const { usage, timing } = done;
  const parts = [`${usage.completion_tokens} tokens`];
  if (timing.itl_mean_s) parts.push(`${(1 / timing.itl_mean_s).toFixed(1)} tokens/s`);
  if (timing.ttft_s !== null) parts.push(`first token ${formatSeconds(timing.ttft_s)}`);
  if (timing.queue_s >= 0.1) parts.push(`queued ${formatSeconds(timing.queue_s)}`);
  parts.push(`${usage.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
  const reasons = { stop: "complete", length: "cut at the limit", cancelled: "stopped by you" };
  parts.push(reasons[done.finish_reason] ?? done.finish_reason);
  return parts;
}
