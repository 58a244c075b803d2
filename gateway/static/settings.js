// What the user can set; kept in the browser, and checked when it is read back.

const KEY = "headrace.settings";
const DEFAULTS = Object.freeze({
  system: "",
  temperature: 0.2, // what suits the small default model
  top_p: 0.9,
  max_tokens: 512,
  seed: null,
});

export class Settings {
  constructor() {
    this.dialog = document.getElementById("settings");
    this.form = document.getElementById("settings-form");
    this.values = { ...DEFAULTS, ...load() };
    this.show();
    this.form.addEventListener("input", () => this.read());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.dialog.close();
    });
    document.getElementById("open-settings").onclick = () => this.dialog.showModal();
    document.getElementById("close-settings").onclick = () => this.dialog.close();
    document.getElementById("reset-settings").onclick = () => {
      this.values = { ...DEFAULTS };
      this.show();
      save(this.values);
    };
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // the backdrop
    });
    this.dialog.addEventListener("close", () => this.show()); // what was invalid goes back
  }

  /** Return the options of a request; what is empty is left to the server. */
  options() {
    const { temperature, top_p, max_tokens, seed } = this.values;
    const options = { temperature, top_p };
    if (max_tokens !== null) options.max_tokens = max_tokens;
    if (seed !== null) options.seed = seed;
    return options;
  }

  get system() {
    return this.values.system.trim();
  }

  read() {
    const fields = this.form.elements;
    for (const name of Object.keys(DEFAULTS)) {
      const field = fields[name];
      if (!field.validity.valid) continue;
      if (name === "system") this.values.system = field.value;
      else this.values[name] = field.value === "" ? null : Number(field.value);
    }
    this.showOutputs();
    save(this.values);
  }

  show() {
    for (const name of Object.keys(DEFAULTS)) {
      this.form.elements[name].value = this.values[name] ?? "";
    }
    this.showOutputs();
  }

  showOutputs() {
    for (const name of ["temperature", "top_p"]) {
      document.getElementById(`${name}-value`).textContent = this.values[name].toFixed(2);
    }
  }
}

function load() {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY)) ?? {};
    return Object.fromEntries(
      Object.entries(DEFAULTS).flatMap(([name, value]) => {
        const kind = typeof (value ?? 0);
        const isFine = typeof stored[name] === kind || (stored[name] === null && kind === "number");
        const mayBeNull = name === "max_tokens" || name === "seed";
        return isFine && (stored[name] !== null || mayBeNull) ? [[name, stored[name]]] : [];
      }),
    );
  } catch {
    return {}; // no storage, or not ours
  }
}

function save(values) {
  try {
    localStorage.setItem(KEY, JSON.stringify(values));
  } catch {
    // A private window may refuse; the settings then last as long as the page.
  }
}
