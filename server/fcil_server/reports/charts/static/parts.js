"use strict";
/* Puts what the server rendered into the page, piece by piece, so that what the reader has in hand
   stays: focus, open details, scrolled tables, zoomed charts. A section that the reader has set up
   (the last 200, a search, a page) is asked for by itself when it changes.

   The one place where text becomes HTML. All of it is rendered by our server, which escapes what
   comes from clients and configurations. */

fcil.parts = (() => {
  const PAUSE_MS = 2000; // between two fetches of one section, when it changes by itself
  const TYPING_MS = 300;
  const DEFAULTS = { last: "50", page: "1" }; // as pushed: not worth a request of our own
  const own = new Map(); // name of a section -> the reader's parameters, as a query
  const fetched = new Map(); // name -> when last
  const timers = new Map(); // name -> of the next fetch
  const running = new Map(); // name -> what can stop its fetch

  /** What the reader changed is not changed back. */
  const callbacks = {
    beforeNodeMorphed(old, next) {
      if (old.nodeName === "TIME") return old.dateTime !== next.dateTime;
      if (old.dataset?.until) return old.dataset.until !== next.dataset?.until;
      return true;
    },
    beforeNodeRemoved: (node) => !node.classList?.contains("live-plot"),
    beforeAttributeUpdated(name, node) {
      if (node.nodeName === "DETAILS" && name === "open") return false;
      if (name === "data-drawn" || name === "aria-busy") return false;
      const holder = node.nodeName === "OPTION" ? node.closest("select") : node;
      return !(["value", "checked", "selected"].includes(name) && holder === document.activeElement);
    },
  };

  function morph(target, html, morphStyle) {
    const { id } = document.activeElement ?? {};
    Idiomorph.morph(target, html, { morphStyle, callbacks });
    if (id && document.activeElement === document.body) document.getElementById(id)?.focus({ preventScroll: true });
    fcil.charts.scan(document);
  }

  function put(name, html, aloud) {
    const section = document.getElementById(name);
    if (!section) return;
    morph(section, html, "outerHTML");
    fcil.told.settle(document.getElementById(name), { aloud });
  }

  /** A section has changed on the server, and this is how it looks by default. */
  function pushed(name, html) {
    if (own.has(name)) later(name);
    else put(name, html, true);
    fcil.dialogs.follow(name);
  }

  function later(name) {
    if (timers.has(name)) return;
    const wait = Math.max(0, (fetched.get(name) ?? 0) + PAUSE_MS - Date.now());
    timers.set(name, setTimeout(() => {
      timers.delete(name);
      if (document.hidden) later(name);
      else get(name, true);
    }, document.hidden ? PAUSE_MS : wait));
  }

  async function get(name, aloud) {
    running.get(name)?.abort();
    const stop = new AbortController();
    running.set(name, stop);
    fetched.set(name, Date.now());
    const section = document.getElementById(name);
    section?.setAttribute("aria-busy", "true");
    try {
      put(name, await fcil.ask(path(name, own.get(name) ?? ""), { signal: stop.signal }), aloud);
      fcil.banner.clear(name);
    } catch (error) {
      if (error.name !== "AbortError" && error.status !== 401) fcil.banner.say(name, fcil.sentence(error));
    } finally {
      if (running.get(name) === stop) {
        running.delete(name);
        document.getElementById(name)?.removeAttribute("aria-busy");
      }
    }
  }

  /** The address of a part of the run that is shown. */
  function path(name, query) {
    const asked = new URLSearchParams(query);
    const { run } = document.documentElement.dataset;
    if (run && !asked.has("run")) asked.set("run", run);
    return `/part/${encodeURIComponent(name)}?${asked}`;
  }

  /** The reader wants a section so; an empty query is how it comes by itself. */
  function set(name, query) {
    const asked = new URLSearchParams();
    for (const [key, value] of query) if (value !== "" && DEFAULTS[key] !== value) asked.append(key, value);
    if (!document.getElementById(name)?.matches("main > section")) {
      fcil.dialogs.open(path(name, asked));
      return;
    }
    if (asked.size) own.set(name, asked.toString());
    else own.delete(name);
    get(name, false);
  }

  /** What a form asks for, beside what the section's other forms did; its first page. */
  function wanted(form) {
    const asked = new URLSearchParams(own.get(form.dataset.part) ?? "");
    const filled = [...new FormData(form)];
    for (const name of ["page", ...filled.map(([key]) => key)]) asked.delete(name);
    for (const [key, value] of filled) asked.append(key, value);
    return asked;
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-part]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    set(link.dataset.part, new URL(link.href).searchParams);
  });
  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-part]");
    if (!form) return;
    event.preventDefault();
    set(form.dataset.part, wanted(form));
  });
  let typing = 0;
  document.addEventListener("input", (event) => {
    const form = event.target.closest("main form[data-part]");
    if (!form) return;
    clearTimeout(typing);
    typing = setTimeout(() => set(form.dataset.part, wanted(form)), TYPING_MS);
  });

  return { pushed, morph, path };
})();
