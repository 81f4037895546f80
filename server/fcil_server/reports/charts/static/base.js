"use strict";
/* What all scripts of the page share. Each of them adds one name to `fcil`; none is a module, so
   that the frozen report can carry the same files inside itself. */

window.fcil = {};

/** Numbers as the server writes them. */
fcil.format = (() => {
  const grouped = (value, digits) =>
    value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  function bytes(count) {
    let unit = "B";
    for (unit of ["B", "kB", "MB", "GB"]) {
      if (Math.abs(count) < 999.5 || unit === "GB") break;
      count /= 1000;
    }
    const size = Math.abs(count);
    const digits = unit === "B" || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
    return `${grouped(count, digits)} ${unit}`;
  }

  /** A span of time in seconds, as long as it matters: "83 s" is "1 min 23 s". */
  function span(seconds) {
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  }

  /** A value of a chart's axis, with its unit. */
  function value(number, unit) {
    if (number === null || number === undefined) return "-";
    if (unit === "B") return bytes(number);
    if (unit === "%") return `${grouped(number, 1)} %`;
    if (unit === "s") return `${grouped(number, number < 10 ? 2 : 1)} s`;
    return `${grouped(number, Number.isInteger(number) ? 0 : 2)}${unit ? ` ${unit}` : ""}`;
  }

  /** A tick of a chart's axis: shorter, because ticks are round numbers. */
  function tick(number, unit) {
    if (unit === "B") return bytes(number).replace(/(\.\d*?)0+ /, "$1 ").replace(/\. /, " ");
    return `${number.toLocaleString("en-US", { maximumFractionDigits: 3 })}${unit ? ` ${unit}` : ""}`;
  }

  return { bytes, span, value, tick };
})();

/** Make an element: tag, attributes (and text), children. Everything is text, never HTML. */
fcil.make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};

/** An answer of the server that is a refusal: its sentence, and what to do about it. */
fcil.Refusal = class extends Error {
  constructor(status, { says, action } = {}) {
    super([says ?? `the server answered with status ${status}`, action].filter(Boolean).join(" "));
    this.status = status;
  }
};

/** Ask the server; returns the answer as text, or as data if something is posted.

    @throws {fcil.Refusal} the server says no.
    @throws {TypeError} nobody answers. */
fcil.ask = async (path, { post, signal } = {}) => {
  const options = { signal, credentials: "same-origin", cache: "no-store" };
  if (post !== undefined) {
    options.method = "POST";
    options.headers = {
      "Content-Type": "application/json",
      "X-FCIL-CSRF": document.documentElement.dataset.csrf ?? "",
    };
    options.body = JSON.stringify(post);
  }
  const response = await fetch(path, options);
  if (!response.ok) {
    const refusal = new fcil.Refusal(response.status, await told(response));
    if (response.status === 401) fcil.signedOut();
    throw refusal;
  }
  return post === undefined ? response.text() : response.json();

  async function told(answer) {
    try {
      return (await answer.json()).error;
    } catch {
      return undefined; // not one of our answers: the status alone is told
    }
  }
};

/** What went wrong, as a sentence for people. */
fcil.sentence = (error) =>
  error instanceof fcil.Refusal ? error.message : "The dashboard cannot be reached. Is the server running?";

/** The banner: one sentence for each thing that is wrong just now, by its name. */
fcil.banner = (() => {
  const wrong = new Map();
  const place = document.getElementById("banner");
  if (place && !place.hidden) wrong.set("server", [place.textContent]);

  function show() {
    const parts = [...wrong.values()].flatMap((nodes, i) => (i ? [" ", ...nodes] : nodes));
    place.replaceChildren(...parts);
    place.hidden = !parts.length;
  }

  return {
    say(name, ...nodes) {
      const before = wrong.get(name);
      if (before?.length === nodes.length && before.every((node, i) => node === nodes[i])) return;
      wrong.set(name, nodes);
      show();
    },
    clear(name) {
      if (wrong.delete(name)) show();
    },
  };
})();

/** The session is over: nothing more comes until a fresh link is opened. */
fcil.signedOut = () => {
  const link = fcil.make("a", { href: "/enter", text: "Sign in again" });
  fcil.banner.say("session", "This browser is no longer signed in; the view below no longer updates. ", link,
    " with a new link from the command fcil-server page.");
  fcil.stream?.end();
};
