// Signing in to a server that wants an API key. The user is asked for it, the tab keeps it, and each
// websocket gets a ticket instead: an address with a key in it would end up in logs and histories.

const KEY = "headrace.api_key";
const TIMEOUT_MS = 10_000;

export class SignIn {
  /** @param {string=} probe  path that the key must be good for as well */
  constructor(probe) {
    this.probe = probe;
    this.key = sessionStorage.getItem(KEY);
  }

  /** Headers of a request. */
  get headers() {
    return this.key === null ? {} : { Authorization: `Bearer ${this.key}` };
  }

  /**
   * Return the address with a ticket in it, once the user has given a key that fits.
   * @param {URL} url  of a websocket
   * @returns {Promise<URL>} rejects while the server cannot be reached
   */
  async ticketed(url) {
    for (;;) {
      const answer = await this.request("v1/ws-ticket", "POST");
      const probed = answer.ok && this.probe ? await this.request(this.probe, "GET") : answer;
      if (probed.ok) {
        const { ticket } = await answer.json();
        const address = new URL(url);
        address.searchParams.set("ticket", ticket);
        return address;
      }
      if (probed.status === 403) await this.ask("This page needs an admin's API key.");
      else if (probed.status !== 401) throw new Error(`no ticket: ${probed.status}`);
      else if (this.key !== null) await this.ask("The server does not know this API key.");
      else await this.ask("This server wants an API key.");
    }
  }

  request(path, method) {
    return fetch(new URL(path, document.baseURI), {
      method,
      headers: this.headers,
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
  }

  /** Show a dialog until the user has given a key. */
  async ask(reason) {
    const dialog = document.createElement("dialog");
    dialog.className = "sign-in";
    const form = document.createElement("form");
    const label = document.createElement("label");
    label.htmlFor = "api-key";
    label.textContent = reason;
    const input = document.createElement("input");
    Object.assign(input, { id: "api-key", type: "password", required: true });
    input.pattern = "[!-~]+"; // what a header can carry
    input.autocomplete = "current-password";
    const button = document.createElement("button");
    button.textContent = "Sign in";
    form.append(label, input, button);
    dialog.append(form);
    document.body.append(dialog);
    dialog.showModal();
    await new Promise((resolve) => {
      form.addEventListener("submit", (event) => {
        event.preventDefault(); // it is sent nowhere
        resolve();
      });
      // There is no way around it: Escape does nothing, and whatever else closes it opens it again.
      dialog.addEventListener("keydown", (event) => {
        if (event.key === "Escape") event.preventDefault();
      });
      dialog.addEventListener("close", () => dialog.isConnected && dialog.showModal());
    });
    this.key = input.value;
    sessionStorage.setItem(KEY, this.key);
    dialog.remove();
  }
}
