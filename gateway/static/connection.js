// The native stream protocol (docs/protocol.md) over one websocket that comes back by itself.

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 15_000;
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
    this.url = url;
    this.onState = onState;
    this.socket = null;
    this.hello = null;
    this.streams = new Map();
    this.numStarted = 0;
    this.numFailures = 0;
    this.retryAfterMs = 0;
    this.retryTimer = 0;
    this.pingTimer = 0;
    this.pongTimer = 0;
    addEventListener("online", () => this.retryNow());
  }

  get isOpen() {
    return this.hello !== null;
  }

  /** Begin a generation and return its id. */
  start(request, handlers) {
    const id = `c${++this.numStarted}`;
    this.streams.set(id, handlers);
    this.send({ type: "start", id, request, return_token_ids: true });
    return id;
  }

  cancel(id) {
    if (this.streams.has(id)) this.send({ type: "cancel", id });
  }

  /** Connect at once instead of waiting for the timer. */
  retryNow() {
    if (this.socket === null) this.connect();
  }

  connect() {
    clearTimeout(this.retryTimer);
    this.onState({ name: "connecting" });
    const socket = new WebSocket(this.url, "headrace.v1.json");
    this.socket = socket;
    socket.onmessage = (event) => this.receive(JSON.parse(event.data));
    socket.onclose = () => this.lost(socket);
  }

  send(message) {
    this.socket?.send(JSON.stringify(message));
  }

  receive(message) {
    const stream = this.streams.get(message.id);
    switch (message.type) {
      case "hello":
        this.hello = message;
        this.numFailures = 0;
        this.retryAfterMs = 0;
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
        this.retryAfterMs = message.retry_after_s * 1000;
        break;
      case "pong":
        clearTimeout(this.pongTimer);
        break;
    }
  }

  // A browser cannot see that the other side is gone until it tries to speak to it.
  ping() {
    const socket = this.socket;
    this.send({ type: "ping", t: Math.round(performance.now()) });
    clearTimeout(this.pongTimer);
    this.pongTimer = setTimeout(() => this.lost(socket), PONG_TIMEOUT_MS);
  }

  lost(socket) {
    if (this.socket !== socket) return;
    socket.onclose = socket.onmessage = null;
    socket.close();
    clearInterval(this.pingTimer);
    clearTimeout(this.pongTimer);
    this.socket = null;
    this.hello = null;
    const streams = [...this.streams.values()];
    this.streams.clear();
    for (const stream of streams) stream.failed("The connection to the server was lost.");

    // Twice as long each time, and never all pages at the same moment.
    const backoff = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.numFailures++);
    const delay = Math.max(this.retryAfterMs, backoff) * (0.75 + Math.random() / 2);
    this.retryTimer = setTimeout(() => this.connect(), delay);
    this.onState({ name: "waiting", retryAtMs: performance.now() + delay });
  }
}
