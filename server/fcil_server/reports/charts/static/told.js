"use strict";
/* What the page tells in words by itself: how long ago, how long still, the state in the header, and
   for ears what is new. */

fcil.told = (() => {
  const PAUSE_MS = 5000; // between two announcements: nobody can listen faster
  const AT_ONCE = 3;
  const DAY = 86400;
  const title = document.getElementById("title").dataset.window;
  const announcer = document.getElementById("announcer");
  const seen = new Map(); // section -> what has been told in it
  const settled = new WeakMap(); // <time> -> the moment that is written in it for good
  const queue = [];
  let pausing = false;
  let ahead = 0; // seconds that the server's clock is ahead of this one

  const now = () => Date.now() / 1000 + ahead;

  /** A moment of the last day by how long ago it was; any other by the clock. */
  function when(at) {
    const ago = now() - at;
    if (ago >= DAY || ago <= -1.5) {
      const near = Math.abs(ago) < DAY / 2;
      return new Date(at * 1000).toLocaleString([], near ? { timeStyle: "medium" } : { dateStyle: "medium", timeStyle: "short" });
    }
    if (ago < 1.5) return "now";
    return `${ago < 60 ? `${Math.round(ago)} s` : coarse(ago)} ago`;
  }

  const coarse = (s) => (s < 3600 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`);

  const put = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };

  /** Write all times below an element as seen from now. */
  function times(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      if (settled.get(element) === element.dateTime) continue;
      const at = Date.parse(element.dateTime) / 1000;
      if (Number.isNaN(at)) continue;
      put(element, when(at));
      if (now() - at >= DAY) settled.set(element, element.dateTime);
      if (!element.title) element.title = new Date(at * 1000).toLocaleString();
    }
    for (const element of root.querySelectorAll("[data-until]")) {
      put(element, fcil.format.span(Number(element.dataset.until) - now()));
    }
  }

  /** Copy the state in a few words into the header and the window's title. */
  function top() {
    const state = document.querySelector("[data-top]")?.textContent.trim().replace(/\s+/g, " ") ?? "";
    const known = state === document.getElementById("live").textContent; // said beside it already
    put(document.getElementById("top-state"), known ? "" : state);
    document.title = state ? `${state} · ${title}` : title;
  }

  /** Note what a section tells; aloud: say what it did not tell before. */
  function news(section, aloud) {
    const before = seen.get(section.id);
    const here = new Set();
    for (const element of section.querySelectorAll("[data-say]")) {
      const { say } = element.dataset;
      here.add(say);
      if (aloud && before && !before.has(say)) queue.push(say);
    }
    seen.set(section.id, here);
    speak();
  }

  function speak() {
    if (pausing || !queue.length) return;
    const sentences = queue.splice(0, queue.length);
    const more = sentences.length - AT_ONCE;
    const text = sentences.slice(0, AT_ONCE).join(". ") + (more > 0 ? `. And ${more} more.` : ".");
    announcer.replaceChildren(fcil.make("p", { text }));
    pausing = true;
    setTimeout(() => {
      pausing = false;
      speak();
    }, PAUSE_MS);
  }

  function settle(section, { aloud = true } = {}) {
    times(section);
    news(section, aloud);
    top();
  }

  setInterval(() => {
    if (!document.hidden) times(document);
  }, 1000);
  for (const section of document.querySelectorAll("main > section")) settle(section, { aloud: false });

  function say(sentence) {
    queue.push(sentence.replace(/\.$/, ""));
    speak();
  }

  return { settle, times, say, setClock: (unix) => { ahead = unix - Date.now() / 1000; } };
})();
