// The native stream protocol (docs/protocol.md) over one websocket that comes back by itself.

import { RetryingSocket } from "./retrying_socket.js";

const PONG_TIMEOUT_MS = 10_000;

/**
 * Handlers of one stream; after `done` or `failed` nothing more is called.
 * @typedef {Object} StreamHandlers
 * @property {(message: Object) => void} delta
 * @property {(message: Object) => void} done
 * @property {(text: string) => void} failed
 */

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
    this.streams.set(id, handlers);
    this.socket.send({ type: "start", id, request, return_token_ids: true });
    return id;
  }

  cancel(id) {
    if (this.streams.has(id)) this.socket.send({ type: "cancel", id });
  }

  receive(message) {
    const stream = this.streams.get(message.id);
    switch (message.type) {
      case "hello":
        this.hello = message;
        this.socket.succeeded();
        this.pingTimer = setInterval(() => this.ping(), message.heartbeat_s * 1000);
        this.onState({ name: "open", hello: message });
        break;
      case "delta":
        stream?.delta(message);
        break;
      case "done":
        this.streams.delete(message.id);
        stream?.done(message);
        break;
      case "error":
        this.streams.delete(message.id);
        stream?.failed(message.error.message);
        break;
      case "goaway":
        this.socket.stayAway(message.retry_after_s);
        break;
      case "pong":
        clearTimeout(this.pongTimer);
        break;
    }
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
    const streams = [...this.streams.values()];
    this.streams.clear();
    for (const stream of streams) stream.failed("The connection to the server was lost.");
  }
}
