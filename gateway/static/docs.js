// What /openapi.json says, to be read. Everything becomes text nodes; nothing is parsed as HTML.

import { SignIn } from "./sign_in.js";

const signIn = new SignIn();

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

class Document {
  constructor(openapi) {
    this.openapi = openapi;
  }

  /** Return a schema behind its reference. */
  schema(schema) {
    const name = schema.$ref?.split("/").pop();
    return name === undefined ? schema : this.openapi.components.schemas[name];
  }

  /** Return a type in a few words. */
  typeName(schema) {
    if (schema.$ref !== undefined) return schema.$ref.split("/").pop();
    const options = schema.anyOf ?? schema.oneOf;
    if (options !== undefined) return options.map((one) => this.typeName(one)).join(" | ");
    if (schema.enum !== undefined) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
    if (schema.const !== undefined) return JSON.stringify(schema.const);
    if (schema.type === "array") return `list of ${this.typeName(schema.items ?? {})}`;
    return schema.type ?? "anything";
  }

  /** Return the objects that a type mentions. */
  objects(schema) {
    const parts = [schema, schema.items, ...(schema.anyOf ?? schema.oneOf ?? [])];
    return parts.filter((part) => this.schema(part ?? {}).properties !== undefined);
  }

  /** Return a table of the fields of an object; those of objects inside are made when opened. */
  fields(schema) {
    const { properties = {}, required = [] } = this.schema(schema);
    const rows = Object.entries(properties).map(([name, type]) => {
      const shown = required.includes(name) ? `${name} (required)` : name;
      return element(
        "tr",
        "",
        element("td", "name", shown),
        element("td", "type", this.typeCell(type)),
        element("td", "", type.description ?? ""),
      );
    });
    return element("table", "fields", element("tbody", "", ...rows));
  }

  typeCell(type) {
    const objects = this.objects(type);
    if (objects.length === 0) return this.typeName(type);
    const details = element("details", "", element("summary", "", this.typeName(type)));
    const fill = () => details.append(...objects.map((one) => this.fields(one)));
    details.addEventListener("toggle", fill, { once: true });
    return details;
  }

  operation(path, method, operation) {
    const summary = element(
      "summary",
      "",
      element("span", "method", method.toUpperCase()),
      element("span", "path", path),
      element("span", "about", operation.summary),
    );
    const inner = element("div", "");
    const heading = (text) => element("h2", "", text);
    if (operation.parameters !== undefined) {
      const rows = operation.parameters.map((parameter) =>
        element(
          "tr",
          "",
          element("td", "name", `${parameter.name} (${parameter.in})`),
          element("td", "type", this.typeName(parameter.schema)),
          element("td", "", parameter.description),
        ),
      );
      inner.append(heading("Parameters"), element("table", "fields", element("tbody", "", ...rows)));
    }
    const body = operation.requestBody?.content["application/json"].schema;
    if (body !== undefined) inner.append(heading("Body"), this.fields(body));
    for (const [status, answer] of Object.entries(operation.responses)) {
      const told = answer.description ?? this.openapi.components.responses[status]?.description;
      inner.append(heading(`${status}: ${told}`));
      const type = answer.content?.["application/json"]?.schema;
      if (type !== undefined && this.schema(type).properties !== undefined) {
        inner.append(this.fields(type));
      }
    }
    return element("details", "operation", summary, inner);
  }
}

async function load() {
  for (;;) {
    const answer = await signIn.request("openapi.json", "GET");
    if (answer.ok) return new Document(await answer.json());
    if (answer.status !== 401) throw new Error(`no document: ${answer.status}`);
    await signIn.ask("This server wants an API key.");
  }
}

function show(state, text) {
  document.getElementById("state").dataset.state = state;
  document.getElementById("state-text").textContent = text;
}

try {
  const known = await load();
  const all = Object.entries(known.openapi.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => known.operation(path, method, one)),
  );
  document.getElementById("operations").append(...all);
  show("open", `${all.length} addresses, version ${known.openapi.info.version}`);
} catch {
  show("waiting", "The server cannot be reached");
}
