// The line under the name of the page that says how the connection is.

export class StateLine {
  /** @param {() => void} retryNow  what the button beside a lost connection does */
  constructor(retryNow) {
    this.element = document.getElementById("state");
    this.text = document.getElementById("state-text");
    this.retry = document.getElementById("retry");
    this.retry.onclick = retryNow;
    this.countdown = 0;
  }

  /** @param {string} openText  what to say while the state is "open" */
  show(state, openText) {
    clearInterval(this.countdown);
    this.element.dataset.state = state.name;
    this.retry.hidden = state.name !== "waiting";
    if (state.name === "open") {
      this.text.textContent = openText;
    } else if (state.name === "connecting") {
      this.text.textContent = "Connecting";
    } else {
      const show = () => {
        const seconds = Math.max(1, Math.ceil((state.retryAtMs - performance.now()) / 1000));
        this.text.textContent = `No connection, next try in ${seconds} s`;
      };
      show();
      this.countdown = setInterval(show, 1000);
    }
  }
}
