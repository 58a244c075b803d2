// The native stream protocol (docs/protocol.md) over one websocket that comes back by itself, and
// with it the streams that were open.

import { RetryingSocket } from "./retrying_socket.js";

const PONG_TIMEOUT_MS = 10_000;

/**
 * Handlers of one stream; after `done` or `failed` nothing more is called.
 * @typedef {Object} StreamHandlers
 * @property {(message: Object) => void} delta
 * @property {(message: Object) => void} done
 * @property {(text: string) => void} failed
 * @property {(isInterrupted: boolean) => void} interrupted  it waits for a connection, or goes on
 */

/** What it takes to go on with a stream on another connection. */
class OpenStream {
  constructor(handlers) {
    this.handlers = handlers;
    this.token = null; // without one it ends with its connection
    this.seq = -1; // of the last delta that has come
    this.isCancelled = false;
    this.isInterrupted = false;
  }

  interrupt(isInterrupted) {
    if (this.isInterrupted === isInterrupted) return;
    this.isInterrupted = isInterrupted;
    this.handlers.interrupted(isInterrupted);
  }
}

export class Connection {
  /**
   * @param {URL} url
   * @param {(state: {name: "connecting"|"open"|"waiting", hello?: Object, retryAtMs?: number}) => void} onState
   */
  constructor(url, onState) {
    this.onState = onState;
    this.hello = null;
    this.streams = new Map();
    this.numStarted = 0;
    this.pingTimer = 0;
    this.pongTimer = 0;
    this.giveUpTimer = 0;
    this.resumeTtlMs = 0;
    this.socket = new RetryingSocket(url, ["headrace.v1.json"], {
      message: (message) => this.receive(message),
      lost: () => this.lost(),
      state: onState,
    });
  }

  get isOpen() {
    return this.hello !== null;
  }

  connect() {
    this.socket.connect();
  }

  /** Connect at once instead of waiting for the timer. */
  retryNow() {
    this.socket.retryNow();
  }

  /** Begin a generation and return its id. */
  start(request, handlers) {
    const id = `c${++this.numStarted}`;
    this.streams.set(id, new OpenStream(handlers));
    const stream = { resumable: true };
    this.socket.send({ type: "start", id, request, return_token_ids: true, stream });
    return id;
  }

  cancel(id) {
    const stream = this.streams.get(id);
    if (stream === undefined) return;
    stream.isCancelled = true; // sent when it goes on, if there is no connection now
    if (this.isOpen) this.socket.send({ type: "cancel", id });
  }

  receive(message) {
    const stream = this.streams.get(message.id);
    switch (message.type) {
      case "hello":
        this.hello = message;
        this.socket.succeeded();
        this.pingTimer = setInterval(() => this.ping(), message.heartbeat_s * 1000);
        this.resumeTtlMs = (message.limits.resume_ttl_s ?? 0) * 1000;
        clearTimeout(this.giveUpTimer);
        this.giveUpTimer = 0;
        this.onState({ name: "open", hello: message });
        for (const [id, open] of this.streams) this.resume(id, open);
        break;
      case "accepted":
        if (stream !== undefined) stream.token = message.resume_token ?? null;
        break;
      case "resumed":
        stream?.interrupt(false);
        break;
      case "delta":
        if (stream === undefined) break;
        stream.seq = message.seq;
        stream.handlers.delta(message);
        break;
      case "done":
        this.streams.delete(message.id);
        stream?.handlers.done(message);
        break;
      case "error":
        this.streams.delete(message.id);
        stream?.handlers.failed(failureText(message.error));
        break;
      case "goaway":
        this.socket.stayAway(message.retry_after_s);
        break;
      case "pong":
        clearTimeout(this.pongTimer);
        break;
    }
  }

  resume(id, stream) {
    this.socket.send({ type: "resume", id, token: stream.token, after: stream.seq });
    if (stream.isCancelled) this.socket.send({ type: "cancel", id });
  }

  // A browser cannot see that the other side is gone until it tries to speak to it.
  ping() {
    this.socket.send({ type: "ping", t: Math.round(performance.now()) });
    clearTimeout(this.pongTimer);
    this.pongTimer = setTimeout(() => this.socket.drop(), PONG_TIMEOUT_MS);
  }

  lost() {
    clearInterval(this.pingTimer);
    clearTimeout(this.pongTimer);
    this.hello = null;
    this.fail((stream) => stream.token === null || this.resumeTtlMs === 0);
    for (const stream of this.streams.values()) stream.interrupt(true);
    // The server gives them up as well then.
    if (this.streams.size > 0 && this.giveUpTimer === 0) {
      this.giveUpTimer = setTimeout(() => this.fail(() => true), this.resumeTtlMs);
    }
  }

  /** End the streams of which this is true. */
  fail(isMeant) {
    for (const [id, stream] of [...this.streams]) {
      if (!isMeant(stream)) continue;
      this.streams.delete(id);
      stream.handlers.failed("The connection to the server was lost.");
    }
  }
}

function failureText(error) {
  if (!error.code?.startsWith("resume_")) return error.message;
  return "The connection was lost for too long; the server no longer has the rest of the answer.";
}
