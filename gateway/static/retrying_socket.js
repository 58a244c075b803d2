// A websocket for JSON messages that comes back by itself.

import { SignIn } from "./sign_in.js";

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 15_000;
const LONGEST_STAY_AWAY_MS = 60_000;
const MAX_FAILURES_UNSEEN = 10; // then a page that nobody looks at asks no more until somebody does

/**
 * @typedef {Object} SocketHandlers
 * @property {(message: Object) => void} message
 * @property {() => void} lost  an attempt or an open connection has ended
 * @property {(state: {name: "connecting"|"waiting", retryAtMs?: number}) => void} state
 */

export class RetryingSocket {
  /**
   * @param {URL} url
   * @param {string[]} protocols
   * @param {SocketHandlers} handlers
   * @param {string=} probe  path that the user's key must be good for as well
   */
  constructor(url, protocols, handlers, probe) {
    this.signIn = new SignIn(probe);
    this.isOpening = false; // until there is a socket
    this.url = url;
    this.protocols = protocols;
    this.handlers = handlers;
    this.socket = null;
    this.numFailures = 0;
    this.retryAfterMs = 0;
    this.retryTimer = 0;
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.numFailures >= MAX_FAILURES_UNSEEN) this.retryNow();
    });
  }

  async connect() {
    clearTimeout(this.retryTimer);
    this.isOpening = true;
    this.handlers.state({ name: "connecting" });
    let url;
    try {
      url = await this.signIn.ticketed(this.url);
    } catch {
      this.comeBackLater();
      return;
    } finally {
      this.isOpening = false;
    }
    this.socket = new WebSocket(url, this.protocols);
    this.socket.onmessage = (event) => this.handlers.message(JSON.parse(event.data));
    this.socket.onclose = () => this.drop();
  }

  /** Connect at once instead of waiting for the timer. */
  retryNow() {
    if (this.socket === null && !this.isOpening) this.connect();
  }

  send(message) {
    this.socket?.send(JSON.stringify(message));
  }

  /** The server answers as it should: the next failure is the first again. */
  succeeded() {
    this.numFailures = 0;
    this.retryAfterMs = 0;
  }

  /** The server asks not to come back sooner. */
  stayAway(seconds) {
    this.retryAfterMs = Math.min(seconds * 1000, LONGEST_STAY_AWAY_MS);
  }

  /** Give up this connection, if there is one, and come back later. */
  drop() {
    const socket = this.socket;
    if (socket === null) return;
    socket.onclose = socket.onmessage = null;
    socket.close();
    this.socket = null;
    this.comeBackLater();
  }

  comeBackLater() {
    this.handlers.lost();

    // Twice as long each time, and never all pages at the same moment.
    const backoff = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.numFailures++);
    const delay = Math.max(this.retryAfterMs, backoff) * (0.75 + Math.random() / 2);
    this.retryTimer = setTimeout(() => {
      if (!document.hidden || this.numFailures < MAX_FAILURES_UNSEEN) this.connect();
    }, delay);
    this.handlers.state({ name: "waiting", retryAtMs: performance.now() + delay });
  }
}

/** Return the address of a websocket of this server. */
export function socketUrl(path) {
  const url = new URL(path, document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url;
}
